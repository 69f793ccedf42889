"""Environments of other projects, as tasks and as agents that talk to a session.

Nothing is imported here. `reasoning_gym` needs the `tasks` extra. `verifiers` needs verifiers 0.4 and `openenv` needs
openenv-core 0.3; neither is an extra of this package, because they insist on an OpenAI client and on a pydantic that
other parts of a common environment do not take.
"""
