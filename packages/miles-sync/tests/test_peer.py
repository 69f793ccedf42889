from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sync_layouts as layouts
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_fleet import manifest_of, same_bits
from sync_processes import Child

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync.convert import scatter
from miles_sync.layout import whole
from miles_sync.peer import PeerBackend, PeerBucket, PeerReceiver, PeerSender, SourcesDifferError, merge
from miles_sync.peer.engine import make_backend
from miles_sync.peer.memory import Arena, Write
from miles_sync.peer.sender import plan_rounds
from miles_sync.peer.shared import SharedBackend
from miles_sync.peer.tcp import TcpBackend
from miles_sync.runs import put_runs, take_runs
from miles_sync.transfer import plan_transfers

SOURCE, TARGET = layouts.fsdp(2), layouts.engine(2)


DEADLINE_S = 60.0


@pytest.fixture(params=["tcp", "shared memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> PeerBackend:
    return TcpBackend(timeout_s=DEADLINE_S) if request.param == "tcp" else SharedBackend(tmp_path)


def held_by(writer: Any) -> set[str]:
    """Handles of the regions that a writer has opened."""
    return set(writer._mapped if hasattr(writer, "_mapped") else writer._connections)


class Pair:
    """Two source ranks and two target ranks in this process."""

    def __init__(self, backend: PeerBackend) -> None:
        self.receivers = [PeerReceiver(SOURCE, TARGET, r, backend) for r in range(2)]
        handles = [r.handle for r in self.receivers]
        self.senders = [PeerSender(SOURCE, TARGET, r, backend.writer(), handles, 900) for r in range(2)]
        self.weights = layouts.weights(3)
        self.manifest = manifest_of(self.weights, 1)
        for receiver in self.receivers:
            receiver.begin("u", self.manifest)

    def rounds(self) -> list[PeerBucket]:
        streams = [s.send(scatter(SOURCE, r, self.weights), self.manifest, "u") for r, s in enumerate(self.senders)]
        return [merge(self.senders[0].plan, parts) for parts in zip(*streams, strict=True)]

    def close(self) -> None:
        for end in [*self.senders, *self.receivers]:
            end.close()


@pytest.fixture
def pair(backend: PeerBackend) -> Pair:
    return Pair(backend)


def test_each_rank_ends_with_its_own_shard(pair: Pair) -> None:
    for bucket in pair.rounds():
        for receiver in pair.receivers:
            receiver.load(bucket)
            receiver.load(bucket)
    for rank, receiver in enumerate(pair.receivers):
        receiver.commit("u")
        receiver.commit("u")
        assert same_bits(receiver.tensors, scatter(TARGET, rank, pair.weights))
    pair.close()


def test_a_missing_transfer_is_named_and_nothing_is_committed(pair: Pair) -> None:
    rounds = pair.rounds()
    for bucket in rounds[1:]:
        pair.receivers[0].load(bucket)
    with pytest.raises(WeightUpdateError, match=r"tensor model.embed.*\d+ transfer.s. did not come") as caught:
        pair.receivers[0].commit("u")
    assert caught.value.tensor == "model.embed_tokens.weight"
    assert pair.receivers[0].tensors == {}
    pair.close()


def test_bits_that_another_writer_changed_are_named(pair: Pair) -> None:
    rounds = pair.rounds()
    pair.receivers[1]._memory.data[:] ^= 1
    last = next(b for b in reversed(rounds) if any(w.transfer in pair.receivers[1]._mine for w in b.written))
    with pytest.raises(WeightUpdateError, match=r"digest is .*, source rank \d says"):
        pair.receivers[1].load(last)
    pair.close()


def test_a_late_write_cannot_reach_weights_that_serve(pair: Pair) -> None:
    for bucket in pair.rounds():
        pair.receivers[0].load(bucket)
    pair.receivers[0].commit("u")
    pair.receivers[0]._memory.data[:] = 255
    assert same_bits(pair.receivers[0].tensors, scatter(TARGET, 0, pair.weights))
    pair.close()


def test_an_update_that_was_rolled_back_stays_over(pair: Pair) -> None:
    receiver = pair.receivers[0]
    receiver.rollback("u")
    with pytest.raises(WeightUpdateError, match="u is over here"):
        receiver.begin("u", pair.manifest)
    with pytest.raises(WeightUpdateError, match="u was not begun here"):
        receiver.commit("u")
    pair.close()


def test_a_peer_that_is_gone_fails_the_sender(backend: PeerBackend) -> None:
    memory, writer = backend.expose(100), backend.writer()
    memory.close()
    write = Write(data=np.zeros(10, np.uint8), offsets=np.zeros(1, np.int64), length=10)
    with pytest.raises(WeightUpdateError, match="is gone"):
        writer.write(memory.handle, [write])
    writer.close()


class Exposed:
    """In a process of its own: a region."""

    def __init__(self, kind: str) -> None:
        self._memory = make_backend(kind, timeout_s=DEADLINE_S).expose(1 << 20)

    def handle(self) -> str:
        return self._memory.handle

    def first(self) -> int:
        return int(self._memory.data[0])


class Writing:
    """In a process of its own: a writer. A library that starts threads must not be used before a fork."""

    def __init__(self, kind: str) -> None:
        self._writer = make_backend(kind, timeout_s=DEADLINE_S).writer()

    def write(self, handle: str, value: int) -> None:
        data = np.full(1 << 20, value, np.uint8)
        self._writer.write(handle, [Write(data=data, offsets=np.zeros(1, np.int64), length=len(data))])


@pytest.mark.parametrize("kind", ["tcp", "nixl"])
def test_a_killed_peer_fails_the_write_and_its_successor_takes_the_next_one(kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl")
    peers = [Child(f"peer-{n}", lambda: Exposed(kind)) for n in range(3)]
    writer = Child("writer", lambda: Writing(kind))
    try:
        known, unknown, successor = (peer.call("handle") for peer in peers)
        writer.call("write", known, 5)
        assert peers[0].call("first") == 5
        for peer in peers[:2]:
            peer.kill()
        for handle in (known, unknown, known):
            with pytest.raises(WeightUpdateError, match=r"is gone|could not write to|cannot reach a peer"):
                writer.call("write", handle, 6)
        writer.call("write", successor, 7)
        assert peers[2].call("first") == 7
    finally:
        for child in (*peers, writer):
            child.stop()


@pytest.mark.parametrize("offset", [95, -1])
def test_a_write_outside_the_region_is_refused(backend: PeerBackend, offset: int) -> None:
    memory, writer = backend.expose(100), backend.writer()
    memory.data[:] = 7
    write = Write(data=np.zeros(10, np.uint8), offsets=np.array([offset], np.int64), length=10)
    with pytest.raises(WeightUpdateError, match="leaves the region|refused a write"):
        writer.write(memory.handle, [write])
    assert (memory.data == 7).all()
    writer.close()
    memory.close()


def test_a_connection_without_the_secret_cannot_write() -> None:
    memory = TcpBackend(timeout_s=5.0).expose(100)
    memory.data[:] = 7
    host, port, _ = memory.handle.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(5)
        stranger.sendall(bytes(16) + (1).to_bytes(8, "little") * 2 + bytes(8) + b"x")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert (memory.data == 7).all()
    memory.close()


@settings(max_examples=50)
@given(data=st.data(), length=st.integers(1, 9), count=st.integers(1, 200))
def test_runs_are_taken_and_put_back_in_order(data: st.DataObject, length: int, count: int) -> None:
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    offsets = np.cumsum(np.array(gaps) + length) - length
    source = np.random.default_rng(0).integers(0, 256, int(offsets[-1]) + length, dtype=np.uint8)
    packed = take_runs(source, offsets, length)
    assert packed.tobytes() == b"".join(source[o : o + length].tobytes() for o in offsets.tolist())
    target = np.zeros_like(source)
    put_runs(target, offsets, length, packed)
    assert take_runs(target, offsets, length).tobytes() == packed.tobytes()
    covered = np.zeros(len(source), bool)
    for o in offsets.tolist():
        covered[o : o + length] = True
    assert not target[~covered].any()


@settings(deadline=None)
@given(bucket_bytes=st.integers(1, 5000))
def test_rounds_hold_every_transfer_once(bucket_bytes: int) -> None:
    plan = plan_transfers(SOURCE, TARGET)
    rounds = plan_rounds(plan, bucket_bytes)
    assert sorted(n for numbers in rounds for n in numbers) == list(range(len(plan.transfers)))
    for numbers in rounds:
        assert len(numbers) == 1 or sum(plan.transfers[n].num_bytes for n in numbers) <= bucket_bytes


class Notes:
    """A writer into memory of this process."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.regions = {handle: np.zeros(size, np.uint8) for handle, size in sizes.items()}

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        for write in writes:
            put_runs(self.regions[handle], write.offsets, write.length, write.data)

    def keep(self, handles: Collection[str]) -> None: ...

    def close(self) -> None: ...


REPLICAS = {
    "2 whole": whole(layouts.specs(), 2),
    "3 whole": whole(layouts.specs(), 3),
    "fsdp 2 x 2": layouts.fsdp(2, 2),
}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(REPLICAS)), bucket_bytes=st.sampled_from([200, 10**6]))
def test_no_byte_of_a_replica_that_drifted_apart_is_announced(
    data: st.DataObject, name: str, bucket_bytes: int
) -> None:
    source, weights = REPLICAS[name], layouts.weights(3)
    writer = Notes({str(rank): Arena(layout).num_bytes for rank, layout in enumerate(TARGET.ranks)})
    senders = [PeerSender(source, TARGET, r, writer, ["0", "1"], bucket_bytes) for r in range(len(source.ranks))]
    stored = [{n: t.clone() for n, t in scatter(source, r, weights).items()} for r in range(len(source.ranks))]
    drifted = data.draw(st.integers(0, len(source.ranks) - 1))
    tensor = data.draw(st.sampled_from(sorted(n for n, t in stored[drifted].items() if t.numel())))
    flat = stored[drifted][tensor].view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1
    streams = [s.send(stored[r], manifest_of(weights, 1), "u") for r, s in enumerate(senders)]
    rounds, found = [], None
    for parts in zip(*streams, strict=True):
        try:
            rounds.append(merge(senders[0].plan, parts))
        except SourcesDifferError as error:
            found = error
            break
    if found is not None:
        assert drifted in found.ranks
        assert found.tensor == tensor
        return
    # It was neither sent nor asked about: others hold the same.
    assert name != "2 whole"
    assert sorted(w.transfer for b in rounds for w in b.written) == list(range(len(senders[0].plan.transfers)))
    for rank, layout in enumerate(TARGET.ranks):
        arena, expected = Arena(layout), scatter(TARGET, rank, weights)
        for stored_name, start in arena.offsets.items():
            got = writer.regions[str(rank)][start : start + arena.specs[stored_name].num_bytes]
            assert got.tobytes() == expected[stored_name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_one_rank_confirms_another_has_to_have_written() -> None:
    source, weights = REPLICAS["2 whole"], layouts.weights(3)
    writer = Notes({str(rank): Arena(layout).num_bytes for rank, layout in enumerate(TARGET.ranks)})
    senders = [PeerSender(source, TARGET, r, writer, ["0", "1"], 10**6) for r in range(2)]
    first, second = (next(s.send(weights, manifest_of(weights, 1), "u")) for s in senders)
    silent = msgspec.structs.replace(first, written=first.written[1:])
    victim = senders[0].plan.transfers[first.written[0].transfer].name
    with pytest.raises(WeightUpdateError, match=r"source rank 0 has not written it") as caught:
        merge(senders[0].plan, [silent, second])
    assert caught.value.tensor == victim
    merged = merge(senders[0].plan, [first, second])
    assert merged.confirmed == ()
    assert len(merged.written) == len(first.written) + len(second.written)
    quiet = [PeerSender(source, TARGET, r, writer, ["0", "1"], 10**6, digests=False) for r in range(2)]
    unsigned = [next(s.send(weights, manifest_of(weights, 1), "u")) for s in quiet]
    assert all(not bucket.confirmed for bucket in unsigned)
    assert {w.digest for w in merge(quiet[0].plan, unsigned).written} == {None}


def test_a_writer_lets_go_of_regions_that_were_replaced(backend: PeerBackend) -> None:
    old, new, writer = backend.expose(100), backend.expose(100), backend.writer()
    write = Write(data=np.full(10, 3, np.uint8), offsets=np.zeros(1, np.int64), length=10)
    for memory in (old, new):
        writer.write(memory.handle, [write])
    assert held_by(writer) == {old.handle, new.handle}
    writer.keep([new.handle])
    assert held_by(writer) == {new.handle}
    writer.write(old.handle, [write])  # it may come back
    writer.close()
    for memory in (old, new):
        assert (memory.data[:10] == 3).all()
        memory.close()


def test_senders_and_receivers_refuse_another_model(pair: Pair) -> None:
    other = manifest_of({"w": torch.zeros(3)}, 1)
    with pytest.raises(WeightUpdateError, match="not of the model"):
        next(pair.senders[0].send({}, other, "u"))
    with pytest.raises(WeightUpdateError, match="not of the model"):
        pair.receivers[0].begin("u2", other)
    stored = scatter(SOURCE, 0, pair.weights)
    del stored["model.norm.weight"]
    with pytest.raises(WeightUpdateError, match=r"tensor model.norm.weight: this rank's layout has it"):
        next(pair.senders[0].send(stored, pair.manifest, "u"))
    stored["model.norm.weight"] = torch.zeros(1)
    with pytest.raises(WeightUpdateError, match=r"tensor model.norm.weight: the layout says float32\[6\]"):
        next(pair.senders[0].send(stored, pair.manifest, "u"))
    with pytest.raises(InvalidFieldError, match="handles: got 1"):
        PeerSender(SOURCE, TARGET, 0, TcpBackend().writer(), [""])
    rounds = pair.rounds()
    with pytest.raises(InvalidFieldError, match="all of round 0"):
        merge(pair.senders[0].plan, [rounds[0], rounds[1]])
    wild = msgspec.structs.replace(rounds[0], written=(msgspec.structs.replace(rounds[0].written[0], transfer=9999),))
    with pytest.raises(WeightUpdateError, match="transfer 9999 is not in the plan"):
        pair.receivers[0].load(wild)
    pair.close()


def test_refuses_a_timeout_that_is_not_positive() -> None:
    with pytest.raises(InvalidFieldError, match="timeout_s: got 0"):
        TcpBackend(timeout_s=0)
