"""Weights over a torch.distributed group, by SGLang's calls: verified, and invisible before the commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_weights import Update, plan_update, raw_bytes, spec_of
from test_weight_update import GREEDY, PROMPT, assert_serves_old

from miles_contracts import Arrival, EngineError, GroupRequest, TensorSpec, update_group_prefix

DISTRIBUTED = "/update_weights_from_distributed"


class Sender:
    """Rank 0 of groups with one engine."""

    def __init__(self) -> None:
        self._meeting = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False
        )
        self._group: Any = None
        self.name = ""

    async def meet(self, engine: Any, name: str = "g") -> None:
        self.name = name
        request = GroupRequest(
            master_address="127.0.0.1",
            master_port=self._meeting.port,
            rank_offset=1,
            world_size=2,
            group_name=name,
            backend="gloo",
            timeout_s=30,
        )
        body = msgspec.to_builtins(request)
        joining = asyncio.create_task(engine.client.weight_call("/init_weights_update_group", body, "joining"))
        store = dist.PrefixStore(update_group_prefix(name), self._meeting)  # type: ignore[attr-defined]
        self._group = await asyncio.to_thread(dist.ProcessGroupGloo, store, 0, 2, timedelta(seconds=30))
        assert (await joining)["address"] == ""

    async def broadcast(self, data: bytes) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        tensor = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        await asyncio.to_thread(lambda: self._group.broadcast([tensor], options).wait())

    def leave(self) -> None:
        self._group = None  # the last reference: its connections end


def announce(sender: Sender, update_id: str, specs: Sequence[TensorSpec], **fields: Any) -> dict[str, Any]:
    return {
        "group_name": sender.name,
        "update_id": update_id,
        "names": [s.name for s in specs],
        "dtypes": [s.dtype for s in specs],
        "shapes": [list(s.shape) for s in specs],
        "digests": [s.digest for s in specs],
        **fields,
    }


async def transfer(engine: Any, sender: Sender, body: dict[str, Any], pieces: Sequence[bytes]) -> None:
    """One call and its collectives."""
    call = asyncio.create_task(engine.client.weight_call(DISTRIBUTED, body, "tensors"))
    for piece in pieces:
        await sender.broadcast(piece)
    await call


def chunks(update: Update, count: int) -> list[list[TensorSpec]]:
    """The update's tensors, with digests, in `count` runs."""
    specs = [spec_of(name, tensor) for name, tensor in update.tensors.items()]
    return [specs[i * len(specs) // count : (i + 1) * len(specs) // count] for i in range(count)]


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_tensors_of_a_group_serve_after_the_commit_and_not_before(
    models, serve, family: str, load_format: str | None
) -> None:
    engine, reference = await serve(models(family, 0)), await serve(models(family, 1))
    before = await engine.client.generate(PROMPT, GREEDY)
    update, sender = plan_update(models(family, 1), 7), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    runs = chunks(update, 3)
    for index, specs in enumerate(runs):
        body = announce(sender, "u", specs, index=index, last=index == len(runs) - 1, load_format=load_format)
        pieces = [raw_bytes(update.tensors[s.name]) for s in specs]
        await transfer(engine, sender, body, [b"".join(pieces)] if load_format else pieces)
    await engine.client.weight_call(DISTRIBUTED, body, "the last bucket again")  # sent again: it is over
    await assert_serves_old(engine, before)
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 7
    got, want = [await e.client.generate(PROMPT, GREEDY) for e in (engine, reference)]
    assert got.output_ids.tolist() == want.output_ids.tolist()
    _, mine = await engine.post("/weights_checker", {"action": "checksum"})
    _, theirs = await reference.post("/weights_checker", {"action": "checksum"})
    assert mine["tensors"] == theirs["tensors"]


async def test_large_tensors_may_come_on_their_own_and_small_ones_together(models, serve) -> None:
    engine = await serve(models("qwen3", 0))
    update, sender = plan_update(models("qwen3", 1), 3), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    specs = chunks(update, 1)[0]
    large = [s for s in specs if s.num_bytes >= 4096]
    small = [s for s in specs if s.num_bytes < 4096]
    assert large
    assert small
    pieces, offsets, transfers = [], {}, []
    end = 0
    for spec in large:
        offsets[spec.name] = end
        pieces.append(raw_bytes(update.tensors[spec.name]))
        transfers.append([end, spec.num_bytes])
        end += spec.num_bytes + 64
    packed = b""
    for spec in small:
        offsets[spec.name] = end + len(packed)
        packed += raw_bytes(update.tensors[spec.name]) + bytes(64)
    fields = {
        "load_format": "miles_transfers",
        "offsets": [offsets[s.name] for s in specs],
        "transfers": [*transfers, [end, len(packed)]],
    }
    await transfer(engine, sender, announce(sender, "u", specs, **fields), [*pieces, packed])
    await engine.client.commit_weight_update("u")
    _, mine = await engine.post("/weights_checker", {"action": "checksum"})
    assert {t["name"]: t["digest"] for t in mine["tensors"]} == {s.name: s.digest for s in specs}


def laid_out(specs: Sequence[TensorSpec], update: Update) -> tuple[dict[str, Any], bytes]:
    """One transfer in which every tensor begins at a cache line; what it brings."""
    data, offsets = b"", []
    for spec in specs:
        offsets.append(len(data))
        data += raw_bytes(update.tensors[spec.name])
        data += bytes(-len(data) % 64)
    return {"load_format": "miles_transfers", "offsets": offsets, "transfers": [[0, len(data)]]}, data


async def test_what_comes_as_it_is_kept_serves_where_it_came_in_and_two_versions_take_turns(models, serve) -> None:
    engine, sender = await serve(models("qwen3", 0)), Sender()
    layout, places = engine.core.updates.layout, []
    await sender.meet(engine)
    for version in range(1, 7):
        update = plan_update(models("qwen3", version % 2), version)
        await engine.client.begin_weight_update(f"u{version}", update.manifest)
        specs = chunks(update, 1)[0]
        fields, data = laid_out(specs, update)
        await transfer(engine, sender, announce(sender, f"u{version}", specs, **fields), [data])
        await engine.client.commit_weight_update(f"u{version}")
        begin = layout.read(specs[0].name).data_ptr()
        assert [layout.read(s.name).data_ptr() - begin for s in specs] == fields["offsets"]
        places.append(begin)
        _, checks = await engine.post("/weights_checker", {"action": "checksum"})
        assert {t["name"]: t["digest"] for t in checks["tensors"]} == {s.name: s.digest for s in specs}
    assert places[2:] == places[:2] * 2
    assert places[0] != places[1]


@pytest.mark.parametrize("spoil", ["an expert beside it", "an address that kernels do not like"])
async def test_a_bucket_is_copied_as_a_whole_when_one_tensor_of_it_has_to_be(models, serve, spoil: str) -> None:
    family = "qwen3_moe" if spoil == "an expert beside it" else "qwen3"
    engine, sender = await serve(models(family, 0)), Sender()
    await sender.meet(engine)
    update = plan_update(models(family, 1), 1)
    await engine.client.begin_weight_update("u", update.manifest)
    specs = chunks(update, 1)[0]
    fields, data = laid_out(specs, update)
    if family == "qwen3":
        fields["offsets"] = [at + 16 for at in fields["offsets"]]
        fields["transfers"], data = [[0, len(data) + 16]], bytes(16) + data
    await transfer(engine, sender, announce(sender, "u", specs, **fields), [data])
    await engine.client.commit_weight_update("u")
    layout = engine.core.updates.layout
    begin = layout.read(specs[0].name).data_ptr()
    assert [layout.read(s.name).data_ptr() - begin for s in specs] != fields["offsets"]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in layout.tensors.values())
    _, checks = await engine.post("/weights_checker", {"action": "checksum"})
    assert {t["name"]: t["digest"] for t in checks["tensors"]} == {s.name: s.digest for s in specs}


async def test_the_next_transfer_may_be_announced_early_and_even_first(models, serve) -> None:
    engine, sender = await serve(models("qwen3", 0)), Sender()
    await sender.meet(engine)
    update = plan_update(models("qwen3", 1), 1)
    await engine.client.begin_weight_update("u", update.manifest)
    runs, calls = chunks(update, 3), []
    bodies = [
        announce(sender, "u", specs, index=i, last=i == 2, load_format="flattened_bucket")
        for i, specs in enumerate(runs)
    ]
    for body in (bodies[1], bodies[2], bodies[0]):
        calls.append(asyncio.create_task(engine.client.weight_call(DISTRIBUTED, body, "tensors")))
        await asyncio.sleep(0.05)
    assert not any(call.done() for call in calls)
    for specs in runs:
        await sender.broadcast(b"".join(raw_bytes(update.tensors[s.name]) for s in specs))
    await asyncio.gather(*calls)
    await engine.client.weight_call(DISTRIBUTED, bodies[0], "the first one again")  # it is over, and does not wait
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 1


async def test_a_transfer_whose_predecessor_never_comes_ends_with_its_update(models, serve) -> None:
    engine, sender = await serve(models("qwen3", 0)), Sender()
    before = await engine.client.generate(PROMPT, GREEDY)
    await sender.meet(engine)
    update = plan_update(models("qwen3", 1), 1)
    await engine.client.begin_weight_update("u", update.manifest)
    body = announce(sender, "u", chunks(update, 2)[1], index=1, load_format="flattened_bucket")
    call = asyncio.create_task(engine.client.weight_call(DISTRIBUTED, body, "tensors"))
    await asyncio.sleep(0.05)
    await engine.client.rollback_weight_update("another")
    await asyncio.sleep(0.05)
    assert not call.done()
    await engine.client.rollback_weight_update("u")
    with pytest.raises(EngineError, match="'u' is not open"):
        await call
    await assert_serves_old(engine, before)


async def test_a_tensor_may_come_in_pieces(models, serve) -> None:
    engine = await serve(models("qwen3", 0))
    update, sender = plan_update(models("qwen3", 1), 1), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    index = 0
    for spec in chunks(update, 1)[0]:
        data, half = raw_bytes(update.tensors[spec.name]), spec.num_bytes // 2
        for start, piece in ((0, data[:half]), (half, data[half:])):
            part = spec_of(spec.name, torch.from_numpy(np.frombuffer(piece, np.uint8).copy()))
            fields = {"part_of": msgspec.to_builtins(spec), "part_start": start, "load_format": "flattened_bucket"}
            await transfer(engine, sender, announce(sender, "u", [part], index=index, **fields), [piece])
            index += 1
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 1


@pytest.mark.parametrize("last", [True, False])
async def test_a_flipped_bit_is_named_and_the_old_weights_serve_on(models, serve, last: bool) -> None:
    engine = await serve(models("qwen3", 0))
    before = await engine.client.generate(PROMPT, GREEDY)
    update, sender = plan_update(models("qwen3", 1), 1), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    first, second = chunks(update, 2)
    data = bytearray(b"".join(raw_bytes(update.tensors[s.name]) for s in first))
    data[-1] ^= 1
    body = announce(sender, "u", first, last=last, load_format="flattened_bucket")
    if last:
        with pytest.raises(EngineError, match=f"{first[-1].name}.*digest"):
            await transfer(engine, sender, body, [bytes(data)])
    else:
        await transfer(engine, sender, body, [bytes(data)])  # verified while the next one is under way
        body = announce(sender, "u", second, index=1, load_format="flattened_bucket")
        sending = asyncio.create_task(sender.broadcast(bytes(sum(s.num_bytes for s in second))))
        with pytest.raises(EngineError, match=f"{first[-1].name}.*digest"):
            await engine.client.weight_call(DISTRIBUTED, body, "the next bucket")
        sender.leave()
        await asyncio.gather(sending, return_exceptions=True)
    with pytest.raises(EngineError, match="not open"):
        await engine.client.commit_weight_update("u")
    await assert_serves_old(engine, before)


async def test_a_sender_that_goes_away_fails_the_transfer_and_not_the_engine(models, serve) -> None:
    engine = await serve(models("qwen3", 0))
    before = await engine.client.generate(PROMPT, GREEDY)
    update, sender = plan_update(models("qwen3", 1), 1), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    body = announce(sender, "u", chunks(update, 1)[0], load_format="flattened_bucket")
    call = asyncio.create_task(engine.client.weight_call(DISTRIBUTED, body, "tensors"))
    await asyncio.sleep(0.05)
    sender.leave()
    with pytest.raises(EngineError, match="a broadcast in group g failed"):
        await call
    with pytest.raises(EngineError, match=r"not open|join it first"):
        await engine.client.weight_call(DISTRIBUTED, body, "tensors")
    await assert_serves_old(engine, before)
    await sender.meet(engine, "h")
    await engine.client.begin_weight_update("v", update.manifest)
    for index, specs in enumerate(chunks(update, 2)):
        body = announce(sender, "v", specs, index=index, last=bool(index), load_format="flattened_bucket")
        await transfer(engine, sender, body, [b"".join(raw_bytes(update.tensors[s.name]) for s in specs)])
    await engine.client.commit_weight_update("v")
    assert await engine.client.weight_version() == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"digests": None}, "lists of one length"),
        ({"names": []}, "lists of one length"),
        ({"names": ["a", "b"]}, "lists of one length"),
        ({"digests": [None]}, "without a digest"),
        ({"load_format": "pickle"}, "flattened_bucket"),
        ({"group_name": "other"}, "join it first"),
        ({"index": "1"}, "use an integer >= 0"),
        ({"load_format": "miles_transfers"}, "lists of whole numbers"),
        ({"load_format": "miles_transfers", "offsets": [0], "transfers": [[0, -1]]}, "lists of whole numbers"),
        ({"load_format": "miles_transfers", "offsets": [0], "transfers": []}, "give one for each of 1 tensors"),
        ({"load_format": "miles_transfers", "offsets": [], "transfers": [[0, 1]]}, "give one for each of 1 tensors"),
        ({"load_format": "miles_transfers", "offsets": [64], "transfers": [[0, 65]]}, "no transfer brings the bytes"),
        ({"update_id": ""}, "non-empty string"),
    ],
)
async def test_bad_announcements_are_refused(models, serve, change: dict[str, Any], reason: str) -> None:
    engine = await serve(models("qwen3", 0))
    update, sender = plan_update(models("qwen3", 1), 1), Sender()
    await sender.meet(engine)
    await engine.client.begin_weight_update("u", update.manifest)
    spec = chunks(update, 1)[0][0]
    body = announce(sender, "u", [spec], load_format="flattened_bucket") | change
    sending = asyncio.create_task(sender.broadcast(raw_bytes(update.tensors[spec.name])))
    with pytest.raises(EngineError, match=reason) as caught:
        await engine.client.weight_call(DISTRIBUTED, body, "tensors")
    assert caught.value.status == 400
    await engine.post("/destroy_weights_update_group", {"group_name": "g"})
    sender.leave()
    await asyncio.gather(sending, return_exceptions=True)


class Parcels:
    """A way for weights to come that this package does not know."""

    def __init__(self, request: GroupRequest, specs: Sequence[TensorSpec]) -> None:
        self.address = f"{request.group_name} with {len(specs)} tensors"
        self.update: Update

    def receive(self, bucket: dict[str, Any]) -> list[Arrival]:
        update = plan_update(Path(bucket["folder"]), 1)
        return [
            Arrival(spec=spec_of(name, tensor), data=np.frombuffer(raw_bytes(tensor), np.uint8).copy())
            for name, tensor in update.tensors.items()
        ]

    def close(self) -> None:
        """Nothing is held."""


async def test_an_engine_can_be_given_other_ways_for_weights_to_come(models, serve) -> None:
    engine = await serve(models("qwen3", 0), groups={"parcels": Parcels})
    update = plan_update(models("qwen3", 1), 1)
    request = {"master_address": "", "master_port": 0, "rank_offset": 1, "world_size": 2, "backend": "parcels"}
    answer = await engine.client.weight_call("/init_weights_update_group", request, "joining")
    assert answer["address"] == f"weight_update_group with {len(update.tensors)} tensors"
    await engine.client.begin_weight_update("u", update.manifest)
    await engine.client.weight_call(DISTRIBUTED, {"update_id": "u", "folder": str(models("qwen3", 1))}, "parcels")
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 1


async def test_a_transfer_that_comes_after_its_rollback_is_not_held_against_the_next_update(models, serve) -> None:
    asked, told = threading.Event(), threading.Event()

    class LateParcels(Parcels):
        """Bring their tensors when they are told to, and who leaves does not hurry them."""

        def receive(self, bucket: dict[str, Any]) -> list[Arrival]:
            asked.set()
            assert told.wait(60)
            return super().receive(bucket)

    engine = await serve(models("qwen3", 0), groups={"parcels": LateParcels})
    before = await engine.client.generate(PROMPT, GREEDY)
    update = plan_update(models("qwen3", 1), 1)
    request = {"master_address": "", "master_port": 0, "rank_offset": 1, "world_size": 2, "backend": "parcels"}
    body = {"folder": str(models("qwen3", 1)), "last": False}
    await engine.client.weight_call("/init_weights_update_group", request, "joining")
    await engine.client.begin_weight_update("u", update.manifest)
    call = asyncio.create_task(engine.client.weight_call(DISTRIBUTED, {**body, "update_id": "u"}, "parcels"))
    await asyncio.to_thread(asked.wait, 60)
    await engine.client.rollback_weight_update("u")
    told.set()
    await call
    await assert_serves_old(engine, before)
    await engine.client.weight_call("/init_weights_update_group", request, "joining")
    await engine.client.begin_weight_update("v", update.manifest)
    await engine.client.weight_call(DISTRIBUTED, {**body, "update_id": "v"}, "parcels")
    await engine.client.commit_weight_update("v")
    assert await engine.client.weight_version() == 1


async def test_the_next_transfer_comes_while_the_one_before_is_verified(models, serve) -> None:
    update, second = plan_update(models("qwen3", 1), 1), threading.Event()

    class Halves(Parcels):
        """Bring half of the tensors in each of two transfers."""

        def receive(self, bucket: dict[str, Any]) -> list[Arrival]:
            if bucket["index"] == 1:
                second.set()
            return super().receive(bucket)[bucket["index"] :: 2]

    engine = await serve(models("qwen3", 0), groups={"parcels": Halves})
    request = {"master_address": "", "master_port": 0, "rank_offset": 1, "world_size": 2, "backend": "parcels"}
    await engine.client.weight_call("/init_weights_update_group", request, "joining")
    await engine.client.begin_weight_update("u", update.manifest)

    verifying, overlapped = threading.Event(), []

    def verify_slowly() -> None:
        with engine.core.updates._lock:
            verifying.set()
            overlapped.append(second.wait(20))

    thread = threading.Thread(target=verify_slowly)
    thread.start()
    await asyncio.to_thread(verifying.wait, 60)
    for index in range(2):
        body = {"update_id": "u", "folder": str(models("qwen3", 1)), "index": index, "last": index == 1}
        await engine.client.weight_call(DISTRIBUTED, body, "half of the tensors")
    await asyncio.to_thread(thread.join)
    assert overlapped == [True]
    await engine.client.commit_weight_update("u")
    assert await engine.client.weight_version() == 1
