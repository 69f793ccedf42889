"""The typed configuration of a run: every value a user may set, with its meaning, unit and default.

`RunConfig` composes the sections, one module each; the trainer's section is `miles_trainer`'s own. All models are
frozen and refuse unknown keys. Configuration objects stop at constructors: what runs gets plain values.
"""

from miles_loop.config.engine import EngineConfig, RouterKind
from miles_loop.config.evaluation import EvaluationConfig, EvaluationMode, EvaluationOverflow, EvaluationSamplingConfig
from miles_loop.config.rollout import Granularity, RolloutConfig, SamplingConfig, UnusedPrompts
from miles_loop.config.run import CheckpointConfig, RecordConfig, RunConfig
from miles_loop.config.runtime import RayConfig, RayPlacement, RuntimeConfig, RuntimeKind
from miles_loop.config.section import Section
from miles_loop.config.sync import BroadcastBackend, CanaryKind, PeerBackendKind, SyncConfig, TransportKind, VerifyKind
from miles_loop.config.task import RewardScope, TaskConfig, TaskSourceKind

__all__ = [
    "BroadcastBackend",
    "CanaryKind",
    "CheckpointConfig",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationMode",
    "EvaluationOverflow",
    "EvaluationSamplingConfig",
    "Granularity",
    "PeerBackendKind",
    "RayConfig",
    "RayPlacement",
    "RecordConfig",
    "RewardScope",
    "RolloutConfig",
    "RouterKind",
    "RunConfig",
    "RuntimeConfig",
    "RuntimeKind",
    "SamplingConfig",
    "Section",
    "SyncConfig",
    "TaskConfig",
    "TaskSourceKind",
    "TransportKind",
    "UnusedPrompts",
    "VerifyKind",
]
