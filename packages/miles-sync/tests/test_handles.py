"""Handles open in processes that are no relatives, name only what SGLang admits, and keep to the sender's memory."""

from __future__ import annotations

import base64
import json
import pickletools
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sync_fleet import manifest_of, random_weights, same_bits
from torch.multiprocessing import get_sharing_strategy, reductions

from miles_contracts import DTYPE_BYTES, InvalidFieldError, ShmTensor, TensorSpec, WeightManifest, WeightUpdateError
from miles_sync import LocalReceiver
from miles_sync.buckets import plan_buckets
from miles_sync.handing import DeviceBuckets, HandingSender, Room
from miles_sync.handles import by_device_uuid, pack
from miles_sync.messages import HandleBucket, handle_device, handle_name
from miles_sync.named_memory import require_named_memory
from miles_sync.tensors import flat_bytes, torch_dtype

SHM = Path("/dev/shm")
BUCKET = 1024
RANKS = tuple(handle_name("http://s:1", rank, "cpu") for rank in range(2))

ADMITTED = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    *(("torch", dtype) for dtype in DTYPE_BYTES),
    ("types", "SimpleNamespace"),
}
"""What a handle may name: all of it is in the list of SGLang 0.5.23's own unpickler."""


@pytest.fixture(autouse=True)
def folder_for_torchs_own_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only here torch passes on host memory that is not ours, by a manager of its own: its socket's path is limited."""
    monkeypatch.setenv("TMPDIR", "/tmp")


class Reader:
    """`handle_reader`, started as a program of its own."""

    def __init__(self) -> None:
        program = [sys.executable, str(Path(__file__).with_name("handle_reader.py"))]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def opened(self, handle: bytes) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(base64.b64encode(handle).decode() + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.kill()


@pytest.fixture
def sender() -> Iterator[HandingSender]:
    made = HandingSender(SHM, BUCKET)
    made.set_receivers(RANKS)
    yield made
    made.close()


def expected(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a reader says of these tensors."""
    return {
        name: [xxhash.xxh3_128_hexdigest(flat_bytes(t.cpu()).numpy().data), str(t.dtype), list(t.shape)]
        for name, t in weights.items()
    }


def sent(sender: Any, weights: dict[str, torch.Tensor], update_id: str, *more: Any) -> Iterator[HandleBucket]:
    """The buckets of an update, each acknowledged when the next one is there, as the driver does it."""
    for bucket in sender.send(iter(weights.items()), manifest_of(weights, 1), update_id, *more):
        yield bucket
        if bucket.index:
            sender.acknowledge(update_id, bucket.index - 1)
    sender.release(update_id)


def names_in(handle: bytes) -> set[tuple[str, str]]:
    """The globals that a pickle names."""
    found, strings, memo = set(), [], []
    for opcode, argument, _ in pickletools.genops(handle):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif opcode.name == "MEMOIZE":
            memo.append(strings[-1] if strings else None)
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo[argument])
        elif opcode.name == "STACK_GLOBAL":
            found.add((strings[-2], strings[-1]))
        else:
            assert opcode.name not in ("GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
    return found


def segments() -> list[Path]:
    return list(SHM.glob("miles-sync-*.bucket"))


def test_an_unrelated_process_opens_the_bits_of_every_bucket_update_after_update(
    sender: HandingSender, reader: Reader
) -> None:
    for number in range(3):
        weights = random_weights(number, scale=4)
        found: list[dict[str, Any]] = [{}, {}]
        last = []
        for bucket in sent(sender, weights, f"u{number}"):
            assert bucket.file is not None
            for rank, handle in enumerate(bucket.handles_of("http://s:1")):
                found[rank] |= reader.opened(handle)
            last.append(bucket.last)
        assert found == [expected(weights)] * 2
        assert last == [False] * (len(last) - 1) + [True]
    assert len(last) > 2


def test_the_same_bucket_is_a_file_for_those_who_open_files(sender: HandingSender, reader: Reader) -> None:
    weights, receiver = random_weights(5), LocalReceiver()
    sender.set_receivers([*RANKS, "http://embedded:1"])
    receiver.begin("u", manifest_of(weights, 1))
    found: dict[str, Any] = {}
    for bucket in sent(sender, weights, "u"):
        assert bucket.file is not None
        receiver.load(bucket.file)
        found |= reader.opened(bucket.handles[RANKS[1]])
    receiver.commit("u")
    assert same_bits(receiver.tensors, weights)
    assert found == expected(weights)


def test_a_reader_that_dies_with_a_bucket_open_takes_it_from_nobody(sender: HandingSender, reader: Reader) -> None:
    weights, victim = random_weights(6, scale=4), Reader()
    found: dict[str, Any] = {}
    for bucket in sent(sender, weights, "u"):
        if bucket.index == 1:
            victim.opened(bucket.handles[RANKS[0]])
            victim.kill()
        found |= reader.opened(bucket.handles[RANKS[1]])
    assert found == expected(weights)


@pytest.mark.parametrize("receivers", [(), RANKS])
def test_no_tensor_is_asked_for_before_the_first_bucket_is(sender: HandingSender, receivers: tuple[str, ...]) -> None:
    weights = random_weights(13)
    asked: list[str] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    sender.set_receivers(receivers)
    sending = sender.send(export(), manifest_of(weights, 1), "u")
    assert asked == []
    next(sending)
    assert asked


def test_no_tensor_is_held_when_its_bucket_is_full(sender: HandingSender) -> None:
    weights = random_weights(14, scale=4)
    made: list[weakref.ref[torch.Tensor]] = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            fresh = tensor.clone()
            made.append(weakref.ref(fresh))
            yield name, fresh
            del fresh

    sending = sender.send(export(), manifest_of(weights, 1), "u")
    assert len([next(sending) for _ in range(3)]) == 3
    assert [ref() for ref in made[:-1]] == [None] * (len(made) - 1)


def test_digests_are_made_only_for_those_who_compare_them(sender: HandingSender) -> None:
    for wanted in (True, False):
        sender.set_receivers(RANKS, digests=wanted)
        (bucket, *_) = sent(sender, random_weights(12), f"u{wanted}")
        assert bucket.file is not None
        assert (bucket.file.tensors[0].spec.digest is not None) == wanted


def test_nobody_has_handles_made_for_him_who_does_not_take_them(tmp_path: Path) -> None:
    weights, sender = random_weights(7), HandingSender(tmp_path, BUCKET)
    sender.set_receivers(["http://embedded:1", "http://embedded:2"])
    receiver = LocalReceiver()
    receiver.begin("u", manifest_of(weights, 1))
    for bucket in sent(sender, weights, "u"):
        receiver.load(bucket)
    receiver.commit("u")
    assert same_bits(receiver.tensors, weights)
    with pytest.raises(InvalidFieldError, match=r"directory: got '.*'; handles of host memory need /dev/shm"):
        sender.set_receivers(RANKS)
    with pytest.raises(InvalidFieldError):
        require_named_memory(tmp_path)
    sender.close()


def test_a_handle_names_nothing_that_sglang_does_not_admit(sender: HandingSender) -> None:
    weights = {name: torch.zeros(3).to(torch_dtype(name)) for name in sorted(DTYPE_BYTES)}
    for bucket in sent(sender, weights, "u"):
        for handle in bucket.handles.values():
            assert names_in(handle) <= ADMITTED
            assert ("torch.multiprocessing.reductions", "rebuild_storage_filename") in names_in(handle)


def test_torch_shares_with_others_as_it_did_before(sender: HandingSender) -> None:
    before = get_sharing_strategy()
    list(sent(sender, random_weights(8), "u"))
    assert get_sharing_strategy() == before


def test_nothing_is_left_in_shared_memory() -> None:
    before = set(segments())
    sender = HandingSender(SHM, BUCKET)
    sender.set_receivers(RANKS)
    stream = sent(sender, random_weights(9, scale=4), "u")
    next(stream), next(stream)
    assert len(set(segments()) - before) == 2
    sender.close()
    assert set(segments()) <= before


_PLACE = (torch.Tensor, torch.Size([4]), (1,), 0, torch.storage.TypedStorage, torch.uint8)
_MEMORY = (b"handle", 512, 0, False, b"counter", 0, b"event", True)
REDUCED = (reductions.rebuild_cuda_tensor, (*_PLACE, 3, *_MEMORY))
"""What torch says of a CUDA tensor, by its source; making one needs a GPU."""


def test_a_device_is_named_by_its_uuid() -> None:
    function, arguments = by_device_uuid(REDUCED, lambda device: f"GPU-{device}")
    assert function is reductions.rebuild_cuda_tensor
    assert arguments[6] == "GPU-3"
    assert arguments[:6] + arguments[7:] == REDUCED[1][:6] + REDUCED[1][7:]


@pytest.mark.parametrize("reduced", [(REDUCED[0], ("x",) * 15), (reductions.rebuild_tensor, REDUCED[1])])
def test_a_torch_that_describes_device_memory_otherwise_is_found_out(reduced: Any) -> None:
    with pytest.raises(WeightUpdateError, match="describes device memory in an unknown way"):
        by_device_uuid(reduced, str)


def test_device_buckets_open_as_well_whatever_torch_makes_of_their_memory(reader: Reader) -> None:
    """On the CPU torch's own reduction shares host memory: the same path as on a device, down to the handle."""
    weights = random_weights(10, scale=4)
    sender, found = DeviceBuckets(BUCKET), {}
    for bucket in sent(sender, weights, "u", RANKS):
        assert bucket.file is None
        found |= reader.opened(bucket.handles[RANKS[0]])
    assert found == expected(weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_block", [False, True])
def test_device_memory_opens_in_an_unrelated_process(reader: Reader, in_block: bool) -> None:
    weights = {name: tensor.cuda() for name, tensor in random_weights(11, scale=4).items()}
    if in_block:
        weights = laid_in_block(weights)
    sender, found = HandingSender(SHM, BUCKET), [{}, {}]
    names = [handle_name("http://s:1", rank, "cuda") for rank in range(2)]
    sender.set_receivers(names)
    for bucket in sent(sender, weights, "u"):
        assert bucket.file is None
        for rank, name in enumerate(names):
            found[rank] |= reader.opened(bucket.handles[name])
    assert found == [expected(weights)] * 2
    sender.set_receivers([*names, "http://embedded:1"])
    assert all(bucket.file is not None for bucket in sent(sender, weights, "v"))
    sender.close()


def laid_in_block(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors side by side in one storage, each at a multiple of 64 bytes."""
    sizes = {name: tensor.nbytes + -tensor.nbytes % 64 for name, tensor in weights.items()}
    device = next(iter(weights.values())).device
    block, end, placed = torch.empty(64 + sum(sizes.values()), dtype=torch.uint8, device=device), 64, {}
    for name, tensor in weights.items():
        place = block[end : end + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        placed[name] = place.copy_(tensor)
        end += sizes[name]
    return placed


@settings(max_examples=60, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from(sorted(DTYPE_BYTES)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    apart=st.lists(st.booleans(), min_size=6, max_size=6),
    shift=st.integers(0, 9),
)
@example(dtypes=["bfloat16", "bool"], sizes=[0, 1, 0, 0, 0, 0], apart=[False] * 6, shift=1)
def test_a_room_keeps_every_byte_and_copies_only_what_lies_elsewhere(
    dtypes: list[str], sizes: list[int], apart: list[bool], shift: int
) -> None:
    specs = tuple(TensorSpec(name=f"w{i}", dtype=d, shape=(sizes[i],)) for i, d in enumerate(dtypes))
    (bucket,) = plan_buckets(specs, 1 << 20)
    block = torch.randint(0, 256, (shift + bucket.num_bytes + 64,), dtype=torch.uint8)
    room, given_bytes = Room(bucket), {}
    lying = True
    for i, piece in enumerate(bucket.pieces):
        data = block[shift + piece.offset :][: piece.num_bytes]
        if apart[i]:
            data = data.clone()
        lying = lying and (not len(data) or (not apart[i] and data.storage_offset() % DTYPE_BYTES[dtypes[i]] == 0))
        given_bytes[piece.spec.name] = data.clone()
        room.put(piece, data)
    memory, offsets = room.finish()
    for piece in bucket.pieces:
        start = offsets[piece.spec.name]
        taken = memory[start : start + piece.num_bytes]
        assert torch.equal(taken, given_bytes[piece.spec.name])
        taken.view(torch_dtype(piece.spec.dtype))  # where its dtype can begin
    if lying and len(memory):
        inside = block.data_ptr() <= memory.data_ptr() < block.data_ptr() + len(block)
        assert inside, "was copied without need"
        assert memory.untyped_storage()._cdata != block.untyped_storage()._cdata


def test_names_say_of_whom_and_where() -> None:
    assert handle_device(handle_name("http://[::1]:30000", 11, "cuda")) == "cuda"
    assert handle_device("http://a:1") is None
    assert handle_device("http://a:1#0") is None
    handles_by_name = {handle_name("http://a:1", rank, "cpu"): bytes([rank]) for rank in (10, 2, 0)}
    handles_by_name[handle_name("http://a:11", 0, "cpu")] = b"other"
    bucket = HandleBucket(update_id="u", index=0, num_bytes=1, handles=handles_by_name)
    assert bucket.handles_of("http://a:1") == [b"\0", b"\2", b"\n"]
    assert bucket.handles_of("http://a:11") == [b"other"]
    assert bucket.handles_of("http://a") == []


def test_an_export_that_is_not_the_manifest_is_refused_by_name_on_a_device_too() -> None:
    manifest = WeightManifest(version=1, tensors=(TensorSpec(name="a", dtype="float32", shape=(2,)),))
    for weights in ({"b": torch.zeros(2)}, {"a": torch.zeros(2), "c": torch.zeros(1)}):
        with pytest.raises(WeightUpdateError, match="the export"):
            list(DeviceBuckets(BUCKET).send(weights.items(), manifest, "u", RANKS))


def test_memory_that_torch_does_not_pass_on_is_named() -> None:
    spec = TensorSpec(name="a", dtype="float32", shape=(2,))
    memory = torch.zeros(8, dtype=torch.uint8, requires_grad=False)

    class Unshared(torch.Tensor):
        def __reduce_ex__(self, protocol: object) -> Any:
            raise RuntimeError("not this one\nframe #0")

    with pytest.raises(WeightUpdateError, match="gives no handle of memory on cpu: not this one;"):
        pack(memory.as_subclass(Unshared), [ShmTensor(spec=spec, offset=0)])
