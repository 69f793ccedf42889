"""What this machine must have before a run's folder is made, or an engine started for a measurement."""

from __future__ import annotations

from pathlib import Path

from miles_loop.config import RunConfig, RuntimeKind
from miles_loop.gateway import require_router
from miles_loop.models import num_experts
from miles_loop.ports import choose_ports
from miles_loop.preflight import starts_dedicated
from miles_loop.runtime import require_runtime
from miles_loop.sglang_engine import require_sglang
from miles_rollout.engine_identity import EngineKind


def check_machine(config: RunConfig, *, training: bool = True) -> None:
    """Refuse what this machine lacks: the runtime, an engine or a router that is not installed, a port that is taken.

    Args:
        config: of the run.
        training: False for a measurement, which uses no engines of its own for evaluation.

    Raises:
        InvalidFieldError: with what to install or to set.
    """
    require_runtime(config)
    if training and starts_dedicated(config) and config.engine.kind is EngineKind.SGLANG:
        require_sglang(config.engine)
    model = Path(config.model)
    require_router(config, routing=config.trainer.replay.enabled and model.is_dir() and num_experts(model) is not None)
    if config.runtime.kind is RuntimeKind.LOCAL and not config.engine.urls:
        for port in choose_ports(config.engine.host, config.engine.port, config.engine.replicas):
            port.close()
