"""Environments of other projects, as tasks and as agents that talk to a session.

Nothing is imported here. `miles_rollout.environments.verifiers` needs verifiers 0.4, which is no extra of this
package because it insists on an older OpenAI client than other parts of a common environment do.
"""
