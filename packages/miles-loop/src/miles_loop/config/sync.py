"""Settings of the way that weights take to the engines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from miles_contracts import PauseMode
from miles_loop.config.section import Positive, Seconds, Section


class TransportKind(StrEnum):
    """The way that weights take."""

    LOCAL = "local"
    BROADCAST = "broadcast"
    PEER = "peer"
    DISK = "disk"


class BroadcastBackend(StrEnum):
    """Communicators of the broadcast transport."""

    GLOO = "gloo"
    NCCL = "nccl"


class CanaryKind(StrEnum):
    """Whether a short prompt is sampled around every update, besides asking for versions."""

    OFF = "off"
    AGREE = "agree"
    CHANGE = "change"


class VerifyKind(StrEnum):
    """What an engine that has loaded an update is asked before it serves it."""

    MANIFEST = "manifest"
    DIGESTS = "digests"


class PeerBackendKind(StrEnum):
    """How bytes get into the memory of a peer."""

    TCP = "tcp"
    SHARED = "shared"
    NIXL = "nixl"


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: TransportKind = TransportKind.LOCAL
    """`local` (memory of the trainer's machine: files, to SGLang handles), `broadcast` (one group of the trainer and
    all engines, wherever they are; the default for `rollout.engine = sglang`), `peer` (all trainer ranks write into the
    memory of each engine) or `disk` (changed bytes through a shared folder)."""
    host: str = "127.0.0.1"
    """broadcast: address of the trainer's machine, as the engines' machines reach it."""
    backend: BroadcastBackend = BroadcastBackend.GLOO
    """broadcast: `gloo` (CPU) or `nccl` (trainer and engines on GPUs)."""
    peer_backend: PeerBackendKind = PeerBackendKind.TCP
    """peer: `tcp`, `shared` (one machine) or `nixl` (RDMA; needs `miles-sync[nixl]`)."""
    store: Path | None = None
    """disk: shared folder that versions are published in; default: `weights` in the run folder."""
    checkpoint_dir: Path | None = None
    """disk: local folder of the engines' machine for the patched checkpoint; default: `engine-weights` in the run
    folder."""
    mode: PauseMode = PauseMode.RETRACT
    """Requests that run while weights change: `retract` (recompute their cache), `in_place` or `abort`."""
    bucket_mib: Positive = 512
    """Size in MiB of the buckets that weights travel in."""
    directory: Path = Path("/dev/shm")
    """Shared-memory mount for the buckets; SGLang opens those in /dev/shm only."""
    verify: VerifyKind = VerifyKind.DIGESTS
    """SGLang: `digests` holds its checksums of everything it serves against the trainer's, and those of its engines
    against each other; `manifest` takes its word that it has loaded what was named, which saves the time of hashing.
    What embedded engines receive is verified by digest always."""
    deadline_s: Seconds = 300.0
    """Deadline of one weight update, and of each transfer in it; a late update is rolled back."""
    canary: CanaryKind = CanaryKind.OFF
    """Probe the policy itself after an update, which is taken back when an engine answers wrongly: `agree` (finite and
    alike on all engines), `change` (and not what the engine answered before; for steps that always move weights).
    A probe queues like any request, so engines that are always full answer it late."""
