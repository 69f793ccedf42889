"""What an update of a large model costs on paper: bytes per rank from the real transfer plan, times from link speeds.

Predictions are wire times: what the links allow when everything else is hidden. The published times beside them hold
everything, so their quotient says how much of an update is not the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from miles_contracts import InvalidFieldError
from miles_sync.layout import Layout, RankBuilder, RankLayout, Slice
from miles_sync.models import Architecture, Cut, PlannedTensor
from miles_sync.transfer import minimum_bytes, plan_transfers

GB = 1e9


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """How a side is spread. World size is `tp * pp * replicas`; experts are cut over `ep` of a stage's ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "replicas"):
            if getattr(self, name) < 1:
                raise InvalidFieldError(f"Parallel.{name}", getattr(self, name), "use at least 1")
        if self.tp * self.replicas % self.ep:
            remedy = f"it has to divide the {self.tp * self.replicas} ranks of a stage"
            raise InvalidFieldError("Parallel.ep", self.ep, remedy)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.replicas

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """From `tp8,pp8,ep32,replicas4`.

        Raises:
            InvalidFieldError: an unknown word.
        """
        values: dict[str, int] = {}
        for word in text.split(","):
            name = word.rstrip("0123456789")
            if name not in ("tp", "pp", "ep", "replicas") or name == word or name in values:
                raise InvalidFieldError("layout", text, "write it like tp8,pp8,ep32,replicas4, each at most once")
            values[name] = int(word.removeprefix(name))
        return cls(**values)


def spread(tensors: Sequence[PlannedTensor], parallel: Parallel) -> Layout:
    """The layout of a model: layers over stages, matrices over tensor ranks, experts over expert ranks."""
    layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=0)
    ranks: list[RankLayout] = []
    for stage in range(parallel.pp):
        mine = [t for t in tensors if _stage_of(t, layers, parallel.pp) == stage]
        built: dict[tuple[int, int], RankLayout] = {}
        for number in range(parallel.tp * parallel.replicas):
            key = (number % parallel.tp, number % parallel.ep)
            if key not in built:
                built[key] = _rank(mine, parallel, *key)
            ranks.append(built[key])
    return Layout(tensors=tuple(t.spec for t in tensors), ranks=tuple(ranks))


def _stage_of(tensor: PlannedTensor, layers: int, stages: int) -> int:
    if tensor.layer is None:
        return 0
    return stages - 1 if tensor.layer < 0 else tensor.layer * stages // layers


def _rank(tensors: Sequence[PlannedTensor], parallel: Parallel, tp: int, ep: int) -> RankLayout:
    builder = RankBuilder()
    for tensor in tensors:
        spec = tensor.spec
        if tensor.cut is Cut.COLUMN:
            builder.shard(Slice(spec=spec, index=tp, count=parallel.tp))
        elif tensor.cut is Cut.ROW:
            builder.shard(Slice(spec=spec, dim=1, index=tp, count=parallel.tp))
        elif tensor.cut is Cut.EXPERT:
            builder.shard(Slice(spec=spec, index=ep, count=parallel.ep))
        else:
            builder.keep(spec)
    return builder.build()


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds in GB/s (10^9 bytes), and what of a step changes.

    Attributes:
        network: of one rank's network port.
        copy: of a copy inside a host or device.
        shared_disk: that one host reads from the shared filesystem.
        local_disk: that one host writes to its own.
        changed: share of the model's bytes that a delta has after compression.
        ranks_per_host: ranks that share a host's disks.
    """

    network: float = 50.0
    copy: float = 200.0
    shared_disk: float = 5.0
    local_disk: float = 10.0
    changed: float = 0.02
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidFieldError(f"Links.{name}", getattr(self, name), "give a positive number")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and seconds of one update.

    Attributes:
        model_bytes: as it travels.
        target_bytes: of the largest engine rank's shard.
        sent_max, sent_min: bytes that the busiest and the idlest source rank send peer to peer.
        peer_bytes: bytes of all peer-to-peer transfers; equal to the minimum.
        broadcast_s, peer_s, disk_prepare_s, disk_pause_s, colocated_s: predicted.
    """

    model_bytes: int
    target_bytes: int
    sent_max: int
    sent_min: int
    peer_bytes: int
    minimum_bytes: int
    broadcast_s: float
    peer_s: float
    disk_prepare_s: float
    disk_pause_s: float
    colocated_s: float


def predict(
    tensors: Sequence[PlannedTensor], trainer: Parallel, engine: Parallel, engines: int, links: Links
) -> Prediction:
    """Plan the transfer and divide bytes by speeds.

    - broadcast: a pipelined broadcast passes the whole model through every port once;
    - peer-to-peer: the busiest port, sending or receiving;
    - disk-delta: a host reads the delta and rewrites its checkpoint before the pause; in the pause each engine
      loads its host's share from the page cache;
    - colocated: each rank copies its own shard.
    """
    if engines < 1:
        raise InvalidFieldError("engines", engines, "use at least 1")
    source, one = spread(tensors, trainer), spread(tensors, engine)
    target = Layout(tensors=one.tensors, ranks=one.ranks * engines)
    plan = plan_transfers(source, target)
    sent, received = plan.sent(trainer.world), plan.received(len(target.ranks))
    model = sum(t.spec.num_bytes for t in tensors)
    shard = max(received)
    on_host = min(shard * min(links.ranks_per_host, engine.world), model)
    return Prediction(
        model_bytes=model,
        target_bytes=shard,
        sent_max=max(sent),
        sent_min=min(sent),
        peer_bytes=plan.num_bytes,
        minimum_bytes=minimum_bytes(target),
        broadcast_s=model / GB / links.network,
        peer_s=max(max(sent), shard) / GB / links.network,
        disk_prepare_s=links.changed * model / GB / links.shared_disk + model / GB / links.local_disk,
        disk_pause_s=on_host / GB / links.copy,
        colocated_s=shard / GB / links.copy,
    )


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A published measurement on H100 nodes with its layouts; `assumed` where the layouts were not stated."""

    model: str
    trainer: Parallel
    engine: Parallel
    engines: int
    broadcast_s: float
    peer_s: float
    assumed: bool = False


PUBLISHED = {
    p.model: p
    for p in (
        Published(
            model="qwen3-30b-a3b", trainer=Parallel(tp=4, ep=8, replicas=4), engine=Parallel(tp=8, ep=8), engines=2,
            broadcast_s=2.67, peer_s=2.16, assumed=True,
        ),
        Published(
            model="glm-4.5-air", trainer=Parallel(tp=4, ep=8, replicas=8), engine=Parallel(tp=8, ep=8), engines=4,
            broadcast_s=5.0, peer_s=2.64, assumed=True,
        ),
        Published(
            model="qwen3-235b-a22b", trainer=Parallel(tp=4, pp=4, ep=16, replicas=4), engine=Parallel(tp=16, ep=16),
            engines=4, broadcast_s=10.75, peer_s=3.16, assumed=True,
        ),
        Published(
            model="glm-5.2", trainer=Parallel(tp=4, pp=8, ep=16, replicas=4), engine=Parallel(tp=64, ep=64),
            engines=2, broadcast_s=58.3, peer_s=8.48,
        ),
        Published(
            model="kimi-k2", trainer=Parallel(tp=8, pp=8, ep=32, replicas=4), engine=Parallel(tp=32, ep=32),
            engines=8, broadcast_s=53.28, peer_s=7.23,
        ),
    )
}  # fmt: skip
"""Context-parallel ranks hold the same weights and count as replicas."""


def report(model: Architecture, trainer: Parallel, engine: Parallel, engines: int, links: Links) -> str:
    """The prediction for a model as text, with the published times when they are of these layouts."""
    p = predict(model.tensors(), trainer, engine, engines, links)
    found = PUBLISHED.get(model.name)
    layouts = (trainer, engine, engines)
    known = found if found is not None and (found.trainer, found.engine, found.engines) == layouts else None
    delta_bytes = links.changed * p.model_bytes
    shard, whole, delta = (f"{size / GB:.2f} GB" for size in (p.target_bytes, p.model_bytes, delta_bytes))
    lines = [
        f"{model.name}: {model.shape().total / 1e9:.4g} B parameters, {p.model_bytes / GB:.0f} GB as it travels",
        f"  trainer  {trainer.world} ranks (tp {trainer.tp}, pp {trainer.pp}, ep {trainer.ep}, replicas "
        f"{trainer.replicas}), peer to peer each sends {_range(p.sent_min, p.sent_max)}",
        f"  engines  {engines} x {engine.world} ranks (tp {engine.tp}, ep {engine.ep}), the largest shard is {shard}",
        f"  peer-to-peer volume {p.peer_bytes / GB:.1f} GB, minimum {p.minimum_bytes / GB:.1f} GB",
        f"  links    network {links.network:g} GB/s a rank, copies {links.copy:g} GB/s, shared disk "
        f"{links.shared_disk:g} GB/s and local disk {links.local_disk:g} GB/s a host; a delta is "
        f"{100 * links.changed:g} % of the model",
        "",
        f"  {'transport':14} {'bytes':32} {'predicted, links alone':41} published, all of it",
        _row("broadcast", f"{whole} to each rank", f"{p.broadcast_s:.2f} s", known.broadcast_s if known else None),
        _row("peer-to-peer", f"{shard} to a rank", f"{p.peer_s:.2f} s", known.peer_s if known else None),
        _row(
            "disk-delta",
            f"{delta} to each host",
            f"{p.disk_pause_s:.2f} s pause, {p.disk_prepare_s:.1f} s before it",
            None,
        ),
        _row("colocated", f"{shard} copied by a rank", f"{p.colocated_s:.2f} s", None),
    ]
    if known is not None and known.assumed:
        lines.append("  (the published measurement states its nodes but not these layouts: they are assumed)")
    return "\n".join(lines)


def _row(name: str, volume: str, predicted: str, published: float | None) -> str:
    return f"  {name:14} {volume:32} {predicted:41} {f'{published:.2f} s' if published is not None else '-'}"


def _range(least: int, most: int) -> str:
    low, high = f"{least / GB:.2f}", f"{most / GB:.2f}"
    return f"{high} GB" if low == high else f"{low} to {high} GB"
