"""The local transport's end in the driver: who opens files, who takes handles, and what SGLang is told of them."""

from __future__ import annotations

import base64
import socket
from pathlib import Path
from typing import Any

import pytest
from transport_doubles import MANIFEST, SPECS, Client, Sender, connected, sglang

from miles_contracts import (
    EngineError,
    EngineUnavailableError,
    InvalidFieldError,
    ShmBucket,
    ShmTensor,
    WeightUpdateError,
)
from miles_loop.senders import make_sender
from miles_loop.sglang_weights import PARTIAL
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import LocalTransport, NotConnectedError
from miles_sync.messages import HandleBucket, handle_name

HERE = "http://127.0.0.1:7"


class FileClient(Client):
    """An engine that takes files."""

    async def load_bucket(self, bucket: Any) -> None:
        self.calls.append(("load_bucket", {"bucket": bucket}))


def bucket(*ranks: int, index: int = 0, last: bool = False) -> HandleBucket:
    placed = tuple(ShmTensor(spec=spec, offset=64 + 8 * i) for i, spec in enumerate(SPECS))
    handles = {handle_name(HERE, rank, "cpu"): f"handle {rank}".encode() for rank in ranks}
    file = ShmBucket(path="/dev/shm/b", num_bytes=80, tensors=placed, update_id="u", index=index)
    return HandleBucket(update_id="u", index=index, num_bytes=80, handles=handles, file=file, last=last)


async def test_the_sender_is_told_of_engines_that_take_handles_and_of_nobody_else() -> None:
    sender, a, s = Sender(), FileClient("http://a"), sglang(HERE, tp_size=2)
    transport = LocalTransport(sender)
    await connected(transport, a)
    assert sender.told == []
    await connected(transport, a, s)
    await connected(transport, a, s)
    both = ("http://a", handle_name(HERE, 0, "cpu"), handle_name(HERE, 1, "cpu"))
    assert sender.told == [(both, False)]
    transport.reset()
    await connected(transport, s)
    assert sender.told[1:] == [(both[1:], False)]
    await connected(transport, a)
    await connected(transport, a)
    assert sender.told[2:] == [((), True)]


async def test_handles_are_made_for_the_device_that_the_engine_is_on() -> None:
    sender, s = Sender(), sglang(HERE)
    s.info = {"tp_size": 1, "device": "cuda"}  # type: ignore[dict-item]
    await connected(LocalTransport(sender), s)
    assert sender.told == [((handle_name(HERE, 0, "cuda"),), False)]


async def test_each_rank_is_given_its_own_handle_and_files_go_to_those_who_open_files() -> None:
    a, s = FileClient("http://a"), sglang(HERE, tp_size=2)
    file_engine, engine = await connected(LocalTransport(Sender()), a, s)
    await engine.begin_weight_update("u", MANIFEST)
    await engine.load_bucket(bucket(0, 1))
    await engine.load_bucket(bucket(0, 1, index=1, last=True))
    packed = [base64.b64encode(f"handle {rank}".encode()).decode() for rank in (0, 1)]
    assert s.said("/update_weights_from_tensor") == [
        {
            "serialized_named_tensors": packed,
            "load_format": "flattened_bucket",
            "weight_version": f"{PARTIAL}u",
            "flush_cache": last,
        }
        for last in (False, True)
    ]
    sent = bucket(0)
    await file_engine.load_bucket(sent)
    await file_engine.load_bucket(sent.file)
    assert a.said("load_bucket") == [{"bucket": sent.file}] * 2


async def test_an_engine_that_failed_to_open_a_handle_is_overwritten_and_has_no_group_to_leave() -> None:
    client = sglang(HERE)
    (engine,) = await connected(LocalTransport(Sender()), client)
    await engine.begin_weight_update("u", MANIFEST)
    with pytest.raises(WeightUpdateError, match="bucket 0 has no handle for it"):
        await engine.load_bucket(bucket())
    await engine.resume()  # nothing was sent to it
    client.refuse["/update_weights_from_tensor"] = EngineUnavailableError(HERE, "died")
    with pytest.raises(EngineUnavailableError):
        await engine.load_bucket(bucket(0))
    assert client.said("leave") == []
    with pytest.raises(WeightUpdateError, match="must not serve"):
        await engine.resume()
    with pytest.raises(WeightUpdateError, match="cannot go back"):
        await engine.rollback_weight_update("u")


async def test_an_sglang_that_cannot_share_memory_is_refused_before_the_sender_is_told() -> None:
    sender = Sender()
    for url in ("http://192.0.2.1:5", "http://nowhere.invalid:5"):
        with pytest.raises(InvalidFieldError, match=rf"the SGLang at {url} is not on the trainer's machine; use broad"):
            await connected(LocalTransport(sender), sglang(url))
    with pytest.raises(InvalidFieldError, match="not on the trainer's machine"):
        await connected(LocalTransport(), sglang(HERE))
    assert sender.told == []
    await connected(LocalTransport(sender, check_host=False), sglang("http://192.0.2.1:5"))
    await connected(LocalTransport(sender), sglang(f"http://{socket.gethostname()}:5"))
    assert len(sender.told) == 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineError(HERE, "no such path", 404), NotConnectedError, "does not say how many ranks it has"),
        (None, WeightUpdateError, "updates no dp_size = 2 over a group or by handle"),
    ],
)
async def test_an_sglang_without_ranks_to_make_handles_for_is_named(error: Any, kind: Any, message: str) -> None:
    client = sglang(HERE, dp_size=2)

    async def server_info() -> dict[str, int]:
        if error is not None:
            raise error
        return client.info

    client.server_info = server_info  # type: ignore[method-assign]
    sender = Sender()
    with pytest.raises(kind, match=message) as caught:
        await connected(LocalTransport(sender), client)
    assert caught.value.engine == HERE
    assert sender.told == []


def test_a_mount_without_handles_is_named_as_the_option(tmp_path: Path) -> None:
    sender = make_sender(SenderSettings(transport="local", directory=str(tmp_path)))
    sender.connect(("http://a", "http://b"), SPECS, True)
    with pytest.raises(InvalidFieldError, match=r"sync\.directory: got '.*'; handles of host memory need /dev/shm"):
        sender.connect((handle_name(HERE, 0, "cpu"),), SPECS, False)
    sender.close()
