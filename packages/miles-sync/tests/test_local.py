from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sync_fleet import manifest_of, random_weights, same_bits

from miles_contracts import ShmBucket, WeightUpdateError
from miles_sync import LocalReceiver, LocalSender


def update(sender: LocalSender, weights: dict[str, torch.Tensor], update_id: str = "u1") -> list[ShmBucket]:
    return list(sender.send(weights.items(), manifest_of(weights, 1), update_id))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bucket_bytes=st.integers(64, 30_000), order=st.randoms(use_true_random=False), digests=st.booleans())
def test_all_bits_arrive_in_any_order_of_buckets_each_sent_twice(
    tmp_path: Path, bucket_bytes: int, order: object, digests: bool
) -> None:
    weights = random_weights(0)
    receiver = LocalReceiver()
    with LocalSender(tmp_path, bucket_bytes, digests=digests) as sender:
        buckets = update(sender, weights) * 2
        order.shuffle(buckets)  # type: ignore[attr-defined]
        receiver.begin("u1", manifest_of(weights, 1))
        for bucket in buckets:
            receiver.load(bucket)
        assert receiver.tensors == {}
        receiver.commit("u1")
    receiver.commit("u1")
    assert same_bits(receiver.tensors, weights)
    assert receiver.version == 1
    assert list(tmp_path.iterdir()) == []


def test_digests_are_xxh3_128_of_the_bytes_for_parts_and_for_the_whole(tmp_path: Path) -> None:
    weights = {"w": torch.arange(100, dtype=torch.float32)}
    with LocalSender(tmp_path, 128) as sender:
        buckets = update(sender, weights)
    raw = weights["w"].numpy().tobytes()
    assert [b.part_start for b in buckets] == [0, 128, 256, 384]
    for bucket in buckets:
        part = raw[bucket.part_start : bucket.part_start + 128]
        assert bucket.tensors[0].spec.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(part)}"
        assert bucket.tensors[0].spec.dtype == "uint8"
        assert bucket.part_of is not None
        assert (bucket.part_of.dtype, bucket.part_of.shape) == ("float32", (100,))
        assert bucket.part_of.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw)}"


def test_a_tensor_larger_than_the_digest_chunk_has_the_same_digest_as_in_one_go(tmp_path: Path) -> None:
    weights = {"w": torch.randint(0, 255, (3_000_001,), dtype=torch.uint8)}
    with LocalSender(tmp_path) as sender:
        (bucket,) = update(sender, weights)
    assert bucket.tensors[0].spec.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(weights['w'].numpy())}"


def test_non_contiguous_tensors_travel_as_their_contiguous_bytes(tmp_path: Path) -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4).T, "x": torch.arange(10)[::3]}
    receiver = LocalReceiver()
    receiver.begin("u1", manifest_of(weights, 1))
    with LocalSender(tmp_path) as sender:
        for bucket in update(sender, weights):
            receiver.load(bucket)
    receiver.commit("u1")
    assert all(torch.equal(receiver.tensors[n], weights[n]) for n in weights)


@pytest.mark.parametrize("receivers_copy", [False, True])
def test_acknowledged_buckets_keep_the_senders_memory_at_two_segments(tmp_path: Path, receivers_copy: bool) -> None:
    weights = random_weights(0, scale=4)
    with LocalSender(tmp_path, 1024, receivers_copy=receivers_copy) as sender:
        for update_id in ("u1", "u2"):
            most = 0
            for bucket in sender.send(weights.items(), manifest_of(weights, 1), update_id):
                most = max(most, sender.num_bytes)
                if bucket.index:
                    sender.acknowledge(update_id, bucket.index - 1)
            assert bucket.index > 20
            assert most <= 2 * 4096
            sender.release(update_id)


def test_a_receiver_that_still_maps_an_acknowledged_bucket_keeps_its_bytes(tmp_path: Path) -> None:
    from miles_sync import MappedBucket

    weights = {f"w{i}": torch.full((64,), i, dtype=torch.uint8) for i in range(8)}
    with LocalSender(tmp_path, 64) as sender:
        stream = sender.send(weights.items(), manifest_of(weights, 1), "u1")
        first = next(stream)
        with MappedBucket(first) as mapped:
            data = mapped.bytes_of(first.tensors[0])
            for bucket in stream:
                sender.acknowledge("u1", bucket.index - 1)
            assert (data == 0).all()
            with pytest.raises(ValueError, match="read-only"):
                data[0] = 1


@pytest.mark.parametrize(
    ("given_weights", "message"),
    [
        ({"a": torch.zeros(2)}, "tensor b: the export ended before the manifest did"),
        ({"a": torch.zeros(2), "c": torch.zeros(2)}, "tensor c: the export gave c .not in the manifest. where b"),
        ({"b": torch.zeros(3), "a": torch.zeros(2)}, "tensor b: the export gave b .out of the manifest's order."),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"tensor b: the manifest says float32\[3\], it is float32\[4\]"),
        ({"a": torch.zeros(2).half(), "b": torch.zeros(3)}, "tensor a: .*it is float16"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "tensor c: the export goes on"),
    ],
)
def test_an_export_that_is_not_the_manifest_is_refused_by_name(
    tmp_path: Path, given_weights: dict[str, torch.Tensor], message: str
) -> None:
    manifest = manifest_of({"a": torch.zeros(2), "b": torch.zeros(3)}, 1)
    with LocalSender(tmp_path) as sender, pytest.raises(WeightUpdateError, match=message):
        list(sender.send(given_weights.items(), manifest, "u1"))


def corrupt(bucket: ShmBucket, at: int) -> None:
    data = np.memmap(bucket.path, dtype=np.uint8, mode="r+")
    data[at] ^= 1
    data.flush()


def test_a_flipped_bit_is_found_and_a_clean_second_delivery_heals_it(tmp_path: Path) -> None:
    weights = random_weights(3)
    receiver = LocalReceiver()
    with LocalSender(tmp_path) as sender:
        (bucket,) = update(sender, weights)
        receiver.begin("u1", manifest_of(weights, 1))
        victim = bucket.tensors[4]
        receiver.load(bucket)
        corrupt(bucket, victim.offset + 1)
        with pytest.raises(WeightUpdateError, match=f"tensor {victim.spec.name}: digest is xxh3_128:"):
            receiver.load(bucket)
        # The first delivery's bytes were spoilt by the second: they must not be committed.
        with pytest.raises(WeightUpdateError, match=f"tensor {victim.spec.name}: 0 of"):
            receiver.commit("u1")
        corrupt(bucket, victim.offset + 1)
        receiver.load(bucket)
    receiver.commit("u1")
    assert same_bits(receiver.tensors, weights)


def test_nothing_incomplete_is_committed_and_the_old_weights_stay(tmp_path: Path) -> None:
    weights = random_weights(1)
    receiver = LocalReceiver()
    with LocalSender(tmp_path, 512) as sender:
        receiver.begin("u1", manifest_of(weights, 1))
        for bucket in update(sender, weights):
            receiver.load(bucket)
        receiver.commit("u1")
        before = dict(receiver.tensors)
        receiver.begin("u2", manifest_of(weights, 2))
        for bucket in update(sender, weights, "u2")[:-1]:
            receiver.load(bucket)
        with pytest.raises(WeightUpdateError, match=r"tensor model.mask: 0 of 17 bytes came"):
            receiver.commit("u2")
        receiver.rollback("u2")
        receiver.rollback("u2")
        with pytest.raises(WeightUpdateError, match="u2 was not begun here"):
            receiver.commit("u2")
    assert receiver.version == 1
    assert same_bits(receiver.tensors, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/dev/shm/miles-sync-gone.bucket"}, "cannot open bucket 0.*No such file"),
        ({"num_bytes": 10**9}, "says 1000000000 bytes"),
        ({"num_bytes": 1}, "lies outside bucket 0"),
        ({"update_id": "u9"}, "update u9 was not begun here"),
    ],
)
def test_a_bucket_that_lies_about_its_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    weights = {"w": torch.zeros(4)}
    receiver = LocalReceiver()
    with LocalSender(tmp_path) as sender:
        (bucket,) = update(sender, weights)
        receiver.begin("u1", manifest_of(weights, 1))
        with pytest.raises(WeightUpdateError, match=message):
            receiver.load(msgspec.structs.replace(bucket, **change))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"v": torch.zeros(4)}, "tensor w: is not in the manifest"),
        ({"w": torch.zeros(5)}, r"tensor w: came as float32\[4\], the manifest says float32\[5\]"),
    ],
)
def test_a_tensor_that_the_manifest_does_not_announce_is_refused(
    tmp_path: Path, theirs: dict[str, torch.Tensor], message: str
) -> None:
    receiver = LocalReceiver()
    receiver.begin("u1", manifest_of(theirs, 1))
    with LocalSender(tmp_path) as sender:
        (bucket,) = update(sender, {"w": torch.zeros(4)})
        with pytest.raises(WeightUpdateError, match=message):
            receiver.load(bucket)


def test_a_part_outside_its_tensor_is_refused(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(40)}
    receiver = LocalReceiver()
    receiver.begin("u1", manifest_of(weights, 1))
    with LocalSender(tmp_path, 64) as sender:
        bucket = update(sender, weights)[0]
        with pytest.raises(WeightUpdateError, match="a part at byte 120 lies outside the tensor"):
            receiver.load(msgspec.structs.replace(bucket, part_start=120))
