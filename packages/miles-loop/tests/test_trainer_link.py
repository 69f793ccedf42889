"""The conversation between driver and trainer process, with a service that has no model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loop_toy.groups import group

from miles_contracts import (
    DeadlineExceededError,
    MilesError,
    ShmBucket,
    WeightManifest,
    WeightUpdateError,
    wire,
)
from miles_loop import trainer_link as link
from miles_loop.errors import DiskFullError, RunError, TrainerFailedError
from miles_loop.trainer_client import TrainerClient
from miles_loop.trainer_server import Connection, serve

START = link.Start(model_path="m", config={}, seed=0)
MANIFEST = WeightManifest(version=0, tensors=())


class NonFiniteError(MilesError):
    """As the real trainer raises it."""


class Service:
    """Answers as told."""

    version = 3

    def __init__(self) -> None:
        self.closed = False
        self.asked: list[str] = []
        self.buckets = 2
        self.hold = threading.Event()
        self.hold.set()

    def close(self) -> None:
        """Note it."""
        self.closed = True

    def answer(self, request: link.Request) -> link.Reply:
        """Note the request; fail where the request asks for it."""
        self.asked.append(type(request).__name__)
        self.hold.wait(10)
        match request:
            case link.TrainStep():
                turns = [[link.turn_digest(t, u.start, u.end) for u in t.turns] for g in request.groups for t in g]
                return link.StepDone(version=4, metrics={"loss": 0.5}, turns=turns)
            case link.BeginExport():
                if request.version != self.version:
                    raise WeightUpdateError("wrong version", tensor="w")
                return link.ExportBegun(update_id="u", manifest=MANIFEST)
            case link.NextBucket():
                self.buckets -= 1
                if self.buckets < 0:
                    return link.BucketReady(bucket=None)
                bucket = ShmBucket(path="/x", num_bytes=0, tensors=(), update_id="u", index=self.buckets)
                return link.BucketReady(bucket=bucket)
            case link.Save(directory="/full"):
                raise OSError(28, "No space left on device")
            case link.Save(directory="/nan"):
                raise NonFiniteError("loss is NaN")
            case link.Save(directory="/bug"):
                raise KeyError("oops")
        return link.Done()


@pytest.fixture
def service() -> Service:
    """The service behind the client."""
    return Service()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[TrainerClient]:
    """A started client; its service runs in a thread."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        with theirs:
            serve(Connection(theirs), lambda _: service)

    thread = threading.Thread(target=work)
    thread.start()
    made = TrainerClient(ours, 5)
    assert await made.start(START, 5) == 3
    yield made
    service.hold.set()
    await made.stop()
    await asyncio.to_thread(thread.join)
    assert service.closed


async def test_a_step_returns_metrics_and_digests_of_every_turn(client: TrainerClient) -> None:
    made, _ = group(0, (3, 0))
    done = await client.train_step([made])
    assert done.metrics == {"loss": 0.5}
    assert done.turns == [[link.turn_digest(t, u.start, u.end) for u in t.turns] for t in made]


async def test_weights_come_bucket_by_bucket(client: TrainerClient, service: Service) -> None:
    assert await client.begin(3) == ("u", MANIFEST)
    assert [bucket.index async for bucket in client.buckets("u")] == [1, 0]
    await client.acknowledge("u", 1)
    await client.release("u")
    assert service.asked == ["BeginExport", *["NextBucket"] * 3, "Acknowledge", "ReleaseExport"]


async def test_errors_have_their_reason(client: TrainerClient, tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="wrong version") as refused:
        await client.begin(9)
    assert refused.value.tensor == "w"
    with pytest.raises(DiskFullError):
        await client.save(Path("/full"))
    with pytest.raises(TrainerFailedError, match="loss is NaN") as caught:
        await client.save(Path("/nan"))
    assert caught.value.reason == "non_finite"
    with pytest.raises(TrainerFailedError, match="oops") as caught:
        await client.save(Path("/bug"))
    assert caught.value.reason == "trainer_failed"
    await client.save(tmp_path)  # an error ends nothing


async def test_a_cancelled_call_leaves_the_conversation_whole(client: TrainerClient, service: Service) -> None:
    service.hold.clear()
    call = asyncio.create_task(client.begin(3))
    while not service.asked:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    service.hold.set()
    made, _ = group(0, (2,))
    assert (await client.train_step([made])).version == 4


async def test_a_late_answer_has_a_name(service: Service) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lambda: serve(Connection(theirs), lambda _: service))
    thread.start()
    late = TrainerClient(ours, 0.05)
    await late.start(START, 5)
    service.hold.clear()
    with pytest.raises(DeadlineExceededError, match="the optimiser step"):
        await late.train_step([])
    service.hold.set()
    await late.stop()
    await asyncio.to_thread(thread.join)
    theirs.close()


async def test_a_broken_connection_has_a_name() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    lost = TrainerClient(ours, 5)
    assert not lost.gone
    with pytest.raises(RunError) as caught:
        await lost.start(START, 5)
    assert caught.value.reason == "trainer_gone"
    assert lost.gone
    await lost.stop()


def test_the_first_request_must_be_start_and_garbage_ends_the_service() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(wire.encode(link.Save(directory="/x")) + b"garbage that is no frame at all, 32 bytes")
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(MilesError, match="not a Miles frame"):
        serve(Connection(theirs), lambda _: Service())
    reply = wire.decode(ours.recv(4096), link.Reply)  # type: ignore[arg-type]
    assert isinstance(reply, link.Failed)
    assert "first request must be start" in reply.message
    for sock in (ours, theirs):
        sock.close()


def test_a_driver_that_is_gone_in_the_middle_of_a_frame_ends_the_service() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(wire.encode(START)[:40])
    ours.close()
    serve(Connection(theirs), lambda _: Service())
    theirs.close()
