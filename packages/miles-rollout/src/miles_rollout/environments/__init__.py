"""Environments of other projects, as tasks and as agents that talk to a session.

Nothing is imported here. Each needs the extra of its name, `reasoning_gym` the `tasks` extra. The libraries of
`openenv` and `verifiers` insist on a pydantic and on an OpenAI client that others may not take in one environment.
"""
