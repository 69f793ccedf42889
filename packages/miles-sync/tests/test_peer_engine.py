"""Peers inside an engine server: whole tensors come out of the region as private copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from sync_fleet import manifest_of

from miles_contracts import DTYPE_BYTES, Arrival, GroupRequest, InvalidFieldError, WeightUpdateError, digest
from miles_sync.layout import whole
from miles_sync.messages import peer_group_backend
from miles_sync.peer import PeerSender, merge
from miles_sync.peer.engine import PeerGroup, make_backend, peer_factories, split_address
from miles_sync.transfer import DIVIDED_BYTES

WEIGHTS = {
    "a.weight": torch.arange(30, dtype=torch.float32).reshape(5, 6),
    "b.norm": torch.full((3,), 2.5, dtype=torch.bfloat16),
    "c.weight": torch.arange(200, dtype=torch.int32),
}
MANIFEST = manifest_of(WEIGHTS, 3)


def ask(rank: int, size: int, kind: str = "tcp", **more: int) -> GroupRequest:
    return GroupRequest(
        **more,
        master_address="127.0.0.1",
        master_port=0,
        rank_offset=rank,
        world_size=size,
        backend=peer_group_backend(kind),
        timeout_s=20,
    )


@pytest.fixture(params=["tcp", "shared"])
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[PeerGroup]]:
    """Two engines."""
    factory = peer_factories(str(tmp_path))[peer_group_backend(request.param)]
    made = [factory(ask(rank, 3, request.param), MANIFEST.tensors) for rank in (1, 2)]
    yield made  # type: ignore[misc]
    for group in made:
        group.close()


def sender_to(groups: list[PeerGroup], kind: str) -> PeerSender:
    handles = [split_address(group.address, MANIFEST.tensors) for group in groups]
    source, target = whole(MANIFEST.tensors), whole(MANIFEST.tensors, len(groups))
    return PeerSender(source, target, 0, make_backend(kind).writer(), handles, 256)


def kind_of(groups: list[PeerGroup]) -> str:
    return "tcp" if " tcp:" in groups[0].address else "shared"


def test_every_engine_gets_every_tensor_once_with_the_writers_digest(groups: list[PeerGroup]) -> None:
    got: list[dict[str, bytes]] = [{}, {}]
    for bucket in sender_to(groups, kind_of(groups)).send(WEIGHTS, MANIFEST, "u"):
        body = {"written": msgspec.to_builtins(bucket.written)}
        for engine, group in enumerate(groups):
            for arrival in group.receive(body):
                assert arrival.spec.name not in got[engine]
                assert arrival.part_of is None
                assert arrival.owned, "the engine need not copy it once more"
                assert arrival.data.ctypes.data % 64 == 0
                assert digest(arrival.data) == arrival.spec.digest
                got[engine][arrival.spec.name] = arrival.data.tobytes()
    raw = {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in WEIGHTS.items()}
    assert got == [raw, raw]


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_several_senders_divide_a_large_tensor_and_each_part_has_its_own_digest(kind: str, tmp_path: Path) -> None:
    weights = WEIGHTS | {"d.weight": torch.arange(DIVIDED_BYTES // 2, dtype=torch.float32).reshape(-1, 8)}
    announced = manifest_of(weights, 3)
    factory = peer_factories(str(tmp_path))[peer_group_backend(kind)]
    engines = [factory(ask(3 + index, 5, kind, senders=3), announced.tensors) for index in range(2)]
    handles = [split_address(engine.address, announced.tensors) for engine in engines]
    source, target = whole(announced.tensors, 3), whole(announced.tensors, 2)
    writers = [make_backend(kind).writer() for _ in range(3)]
    senders = [PeerSender(source, target, r, writer, handles, 2**20) for r, writer in enumerate(writers)]
    sent = senders[0].plan.sent(3)
    assert max(sent) - min(sent) < 2 * DIVIDED_BYTES // 100
    streams = [s.send(weights, announced, "u") for s in senders]
    arrivals: list[list[Arrival]] = [[], []]
    for parts in zip(*streams, strict=True):
        body = {"written": msgspec.to_builtins(merge(senders[0].plan, parts).written)}
        for index, engine in enumerate(engines):
            arrivals[index] += engine.receive(body)
    for got in arrivals:
        whole_ones = {a.spec.name: a.data.tobytes() for a in got if a.part_of is None}
        parts = sorted((a for a in got if a.part_of is not None), key=lambda a: a.part_start)
        assert [a.part_of for a in parts] == [announced.tensors[-1]] * 3
        assert [a.part_start for a in parts] == [0, *np.cumsum([len(a.data) for a in parts])[:-1]]
        whole_ones["d.weight"] = b"".join(a.data.tobytes() for a in parts)
        assert whole_ones == {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in weights.items()}
        assert all(a.spec.digest == digest(a.data) and a.spec.num_bytes == len(a.data) for a in got)
    for end in (*senders, *engines):
        end.close()


def test_what_was_received_no_later_write_can_change(groups: list[PeerGroup]) -> None:
    sender = sender_to(groups, kind_of(groups))
    buckets = list(sender.send(WEIGHTS, MANIFEST, "u"))
    arrivals = [a for b in buckets for a in groups[0].receive({"written": msgspec.to_builtins(b.written)})]
    kept = [a.data.copy() for a in arrivals]
    late = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    list(sender.send(late, MANIFEST, "dead trainer"))
    assert all(np.array_equal(a.data, k) for a, k in zip(arrivals, kept, strict=True))
    # Announced with the old digests, what lies there now is found out by whoever compares them.
    first = groups[0].receive({"written": msgspec.to_builtins(buckets[0].written)})[0]
    assert digest(first.data) != first.spec.digest


def test_sides_that_hold_other_dtypes_are_refused(groups: list[PeerGroup]) -> None:
    other = tuple(
        msgspec.structs.replace(s, dtype="float16") if DTYPE_BYTES[s.dtype] == 2 else s for s in MANIFEST.tensors
    )
    with pytest.raises(WeightUpdateError, match=r"engine\.dtype has to be the trainer's"):
        split_address(groups[0].address, other)


def test_bad_announcements_and_kinds_are_refused(groups: list[PeerGroup]) -> None:
    with pytest.raises(InvalidFieldError, match="written"):
        groups[0].receive({"written": [{"transfer": "x"}]})
    assert groups[0].receive({"written": [{"transfer": 999, "digest": None}]}) == []
    with pytest.raises(InvalidFieldError, match="tcp, shared or nixl"):
        make_backend("pigeon")


def test_factories_have_the_names_that_a_driver_asks_for() -> None:
    assert set(peer_factories()) == {peer_group_backend(kind) for kind in ("tcp", "shared", "nixl")}
