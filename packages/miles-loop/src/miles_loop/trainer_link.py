"""What driver and trainer process say to each other: one wire frame a message, requests answered in order.

The driver asks, the trainer process answers exactly once. Weights are not in the frames: a `BucketReady` says where
they are. `TrainStep` carries the groups; `StepDone` returns a digest of every turn the trainer trained
on, so that the driver can prove that these are the tokens the engine sampled.

The first rank of a larger trainer group asks the others in the same way, as their driver:

    driver                      rank 0                         rank k
       ---- OpenGroup ------------>
       <--- GroupOpened -----------   (it listens, on ports that it has bound)
       ---- JoinGroup --------------------------------------->
       <--- Done --------------------------------------------   (it has connected to rank 0)
       ---- Start ---------------->    ---- Start ----------->
       ---- TrainStep ------------>    ---- TrainShare ------>   (then both sum gradients)
       <--- StepDone --------------    <--- ShareDone --------

Where every rank sends weights, rank 0 passes on what the driver says of them, and answers with what all have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from miles_contracts import Group, Trajectory, WeightManifest, digest, row_digests
from miles_sync.messages import AnyBucket, GroupOffer
from miles_sync.sglang_layout import ChecksumTable, SglangForm


class SenderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer process sends weights.

    Attributes:
        transport: `local`, `broadcast`, `peer` or `disk`.
        bucket_bytes: capacity of a bucket.
        directory: local, and peers on one host: the shared-memory mount.
        host: broadcast: address of this process' machine as engines reach it.
        backend: broadcast: `gloo` or `nccl`.
        peer_backend: peer: `tcp`, `shared` or `nixl`.
        store: disk: the folder that versions are published in.
        timeout_s: broadcast: for a group to meet, and for each collective; peer: for what one round writes into one
            engine.
    """

    transport: str = "local"
    bucket_bytes: int = 512 * 2**20
    directory: str = "/dev/shm"
    host: str = "127.0.0.1"
    backend: str = "gloo"
    peer_backend: str = "tcp"
    store: str = ""
    timeout_s: float = 300.0


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True, tag="open_group"):
    """Before `Start`, to rank 0: be ready for the other ranks.

    `host` is the address of its machine as they reach it, `timeout_s` how long ranks wait for each other.
    """

    size: int
    host: str
    timeout_s: float


class GroupOpened(msgspec.Struct, frozen=True, kw_only=True, tag="group_opened"):
    """Where the others find rank 0: the port of the group's meeting point, and for each of them an address and the
    secret that opens it."""

    meeting_port: int
    addresses: tuple[str, ...]
    secrets: tuple[str, ...]


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join_group"):
    """To another rank: connect to rank 0 and do what it asks; the driver has nothing more to say."""

    rank: int
    size: int
    host: str
    meeting_port: int
    address: str
    secret: str
    timeout_s: float


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message: what to train. `config` is the trainer's configuration as plain data."""

    model_path: str
    config: dict[str, Any]
    seed: int
    sender: SenderSettings = SenderSettings()
    checkpoint: str | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The model is loaded (from the checkpoint when one was named)."""

    version: int


class TrainStep(msgspec.Struct, frozen=True, kw_only=True, tag="train_step", eq=False):
    """Do one optimiser step on these groups."""

    groups: list[Group]


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step_done"):
    """`turns` holds, for every trajectory of every group in order, one digest a turn (see `turn_digest`).

    `routes` holds for each of them the digests of its routing rows (`row_digests`), None where it has no routes.
    """

    version: int
    metrics: dict[str, float]
    turns: list[list[str]]
    routes: list[NDArray[Any] | None] = []


class TrainShare(msgspec.Struct, frozen=True, kw_only=True, tag="train_share", eq=False):
    """Do a rank's part of one optimiser step.

    Attributes:
        trajectories: n of them, possibly none.
        advantages, weights: float64 [n] (see `miles_trainer.shares.Share`).
        num_trained, num_members: of the whole step.
    """

    trajectories: list[Trajectory]
    advantages: NDArray[Any]
    weights: NDArray[Any]
    num_trained: int
    num_members: int


class ShareDone(msgspec.Struct, frozen=True, kw_only=True, tag="share_done"):
    """`turns` and `routes` as in `StepDone`, for the trajectories of the share."""

    version: int
    turns: list[list[str]]
    routes: list[NDArray[Any] | None]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """From now on these engines receive: names, or addresses where the transport writes to those.

    `split` says whether all of them take a tensor larger than a bucket in pieces, `digests` whether any compares them.
    """

    receivers: tuple[str, ...]
    split: bool
    digests: bool = True


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """The group that the engines now have to join, None when there is nothing to join."""

    offer: GroupOffer | None


class BeginExport(msgspec.Struct, frozen=True, kw_only=True, tag="begin_export"):
    """Prepare the current weights, which must be of this version, for the engines.

    Rank 0 names the update to the others (`update_id`); the driver is told the name.
    """

    version: int
    update_id: str = ""


class ExportBegun(msgspec.Struct, frozen=True, kw_only=True, tag="export_begun"):
    """Name of the update and what will come."""

    update_id: str
    manifest: WeightManifest


class ExpectChecksums(msgspec.Struct, frozen=True, kw_only=True, tag="expect_checksums"):
    """Before the first bucket: engines that keep their weights in this form will be verified after the last."""

    update_id: str
    form: SglangForm


class GetChecksums(msgspec.Struct, frozen=True, kw_only=True, tag="get_checksums"):
    """After the last bucket: what the checksums of such an engine have to be."""

    update_id: str
    form: SglangForm


class Checksums(msgspec.Struct, frozen=True, kw_only=True, tag="checksums"):
    """As far as they are known."""

    table: ChecksumTable


class NextBucket(msgspec.Struct, frozen=True, kw_only=True, tag="next_bucket"):
    """Fill the next bucket of this update."""

    update_id: str


class BucketReady(msgspec.Struct, frozen=True, kw_only=True, tag="bucket_ready"):
    """The bucket, or None when all tensors have been sent."""

    bucket: AnyBucket | None


class Acknowledge(msgspec.Struct, frozen=True, kw_only=True, tag="acknowledge"):
    """Every engine has loaded this bucket; its memory may be used again."""

    update_id: str
    index: int


class ReleaseExport(msgspec.Struct, frozen=True, kw_only=True, tag="release_export"):
    """The engines are done with this update's buckets."""

    update_id: str


class Save(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Write everything needed to continue into this existing directory."""

    directory: str


class ExportModel(msgspec.Struct, frozen=True, kw_only=True, tag="export_model"):
    """Write model and tokenizer as a Hugging Face folder."""

    directory: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the process."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request was carried out."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request was refused or failed; `kind` is the error's class name, `tensor` the one that it is about."""

    kind: str
    message: str
    tensor: str | None = None


Request = (
    OpenGroup
    | JoinGroup
    | Start
    | TrainStep
    | TrainShare
    | Connect
    | BeginExport
    | ExpectChecksums
    | NextBucket
    | GetChecksums
    | Acknowledge
    | ReleaseExport
    | Save
    | ExportModel
    | Stop
)
Reply = GroupOpened | Started | StepDone | ShareDone | Connected | ExportBegun | BucketReady | Checksums | Done | Failed


def turn_digest(trajectory: Trajectory, start: int, end: int) -> str:
    """Digest of the ids and log-probs [start, end) of a trajectory, bit for bit."""
    ids = trajectory.token_ids[start:end].tobytes()
    return digest(ids + trajectory.logprobs[start:end].tobytes())


def turn_digests(trajectory: Trajectory) -> list[str]:
    """One digest for each turn of a trajectory."""
    return [turn_digest(trajectory, turn.start, turn.end) for turn in trajectory.turns]


def row_digests_of(trajectory: Trajectory) -> NDArray[Any] | None:
    """Digests of the routing rows of a trajectory, None where there are none."""
    return None if trajectory.routing is None else row_digests(trajectory.routing.expert_ids)


def route_digests(groups: Sequence[Group]) -> list[NDArray[Any] | None]:
    """Digests of the routing rows of every trajectory in order, None where there are none."""
    return [row_digests_of(t) for g in groups for t in g]
