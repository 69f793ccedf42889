"""From the configuration to the parts of weight synchronisation: sender settings, the driver's transport, engines."""

from __future__ import annotations

from pathlib import Path

from miles_contracts import PauseMode
from miles_loop.config import CanaryKind, RunConfig, RuntimeKind, TransportKind, VerifyKind
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import (
    BroadcastTransport,
    DiskTransport,
    FleetTransport,
    LocalTransport,
    PeerTransport,
    Sender,
)
from miles_sync import Expect
from miles_sync.messages import peer_group_backend


def sender_settings(config: RunConfig) -> SenderSettings:
    """How the trainer process sends weights."""
    sync = config.sync
    return SenderSettings(
        transport=sync.transport,
        bucket_bytes=sync.bucket_mib * 2**20,
        directory=str(sync.directory),
        host=sync.host,
        backend=sync.backend,
        peer_backend=sync.peer_backend,
        store=str(weight_store(config)),
        timeout_s=sync.deadline_s,
    )


def make_transport(config: RunConfig, sender: Sender, model: Path) -> FleetTransport:
    """The driver's end of the configured transport.

    Args:
        sender: the trainer.
        model: folder with the model's configuration and tokenizer.
    """
    sync = config.sync
    flush, verify = sync.mode is not PauseMode.IN_PLACE, sync.verify is VerifyKind.DIGESTS
    match sync.transport:
        case TransportKind.BROADCAST:
            return BroadcastTransport(sender, flush=flush, verify=verify)
        case TransportKind.PEER:
            backend = peer_group_backend(sync.peer_backend)
            return PeerTransport(sender, backend, sync.deadline_s, config.runtime.trainer_ranks)
        case TransportKind.DISK:
            assert config.run_dir is not None  # a run has one before anything is started
            checkpoint = sync.checkpoint_dir or config.run_dir / "engine-weights"
            return DiskTransport(weight_store(config), checkpoint.absolute(), model, sender if verify else None)
        case TransportKind.LOCAL:
            here = config.runtime.kind is RuntimeKind.LOCAL  # a cluster asks its nodes what they share
            return LocalTransport(sender, flush=flush, check_host=here, verify=verify)


def canary_of(config: RunConfig) -> Expect | None:
    """What the probe of an update has to show; None for no probe."""
    kinds = {CanaryKind.OFF: None, CanaryKind.AGREE: Expect.ANYTHING, CanaryKind.CHANGE: Expect.CHANGE}
    return kinds[config.sync.canary]


def engine_module(config: RunConfig) -> str:
    """The module that an embedded engine's process runs."""
    return "miles_loop.engine_process" if config.sync.transport is TransportKind.PEER else "miles_rollout.engine"


def weight_store(config: RunConfig) -> Path:
    """Where the disk transport publishes versions."""
    assert config.run_dir is not None  # a run has one before anything is started
    return (config.sync.store or config.run_dir / "weights").absolute()
