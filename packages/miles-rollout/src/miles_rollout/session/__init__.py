"""The session server: an agent speaks the OpenAI chat API, the trainer gets exactly what was sampled.

server = SessionServer(router, load_renderer(model_path), SessionConfig())
await server.start()
generate = agent_generate(agent, server, sampling=SamplingParams(max_new_tokens=256), run_seed=7)
trajectories = await generate(task, member=0, attempt=0)
...
generate.report.to_metrics()      # tokens audited, mismatches, repairs by kind, branches, abandoned, truncated
await server.stop()
"""

from miles_rollout.session.agent import AgentGenerate, agent_generate
from miles_rollout.session.audit import AuditReport, SampleRecord, SessionCounters, audit
from miles_rollout.session.config import SessionConfig
from miles_rollout.session.errors import SessionError
from miles_rollout.session.matching import Repair, load_matcher
from miles_rollout.session.requests import OpenRequest
from miles_rollout.session.server import SessionServer
from miles_rollout.session.service import SessionService
from miles_rollout.session.tree import Policy, SessionTree
from miles_rollout.session.upstream import EngineSampler, RouterSampler, Sampler

__all__ = [
    "AgentGenerate",
    "AuditReport",
    "EngineSampler",
    "OpenRequest",
    "Policy",
    "Repair",
    "RouterSampler",
    "SampleRecord",
    "Sampler",
    "SessionConfig",
    "SessionCounters",
    "SessionError",
    "SessionServer",
    "SessionService",
    "SessionTree",
    "agent_generate",
    "audit",
    "load_matcher",
]
