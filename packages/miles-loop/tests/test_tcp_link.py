"""The trainer's network link: the same conversation as over a socket pair, and nobody without the secret gets in."""

from __future__ import annotations

import asyncio
import hmac
import socket
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from loop_toy.groups import group

from miles_contracts import DeadlineExceededError
from miles_loop import trainer_link as link
from miles_loop.errors import RunError
from miles_loop.tcp_link import SECRET_VARIABLE, Listener, connect, join_address
from miles_loop.trainer_client import TrainerClient
from miles_loop.trainer_server import Connection, serve

START = link.Start(model_path="m", config={}, seed=0)


class Service:
    """Keeps what it was sent."""

    version = 7

    def __init__(self) -> None:
        self.steps: list[link.TrainStep] = []

    def close(self) -> None:
        """Nothing is held."""

    def answer(self, request: link.Request) -> link.Reply:
        """One step after the other."""
        assert isinstance(request, link.TrainStep)
        self.steps.append(request)
        turns = [[link.turn_digest(t, u.start, u.end) for u in t.turns] for g in request.groups for t in g]
        return link.StepDone(version=8, metrics={}, turns=turns)


@pytest.fixture
async def listener(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    """A driver's end; the environment holds its secret."""
    made = Listener("127.0.0.1")
    monkeypatch.setenv(SECRET_VARIABLE, made.secret)
    yield made
    made.close()


async def in_thread(work: Callable[[], object]) -> asyncio.Task[object]:
    """A blocking peer."""
    return asyncio.create_task(asyncio.to_thread(work))


async def test_a_batch_arrives_bit_for_bit_and_is_read_in_place(listener: Listener) -> None:
    service = Service()

    def trainer() -> None:
        with connect(listener.address) as sock:
            serve(Connection(sock), lambda _: service)

    peer = await in_thread(trainer)
    client = TrainerClient(listener, 30)
    assert await client.start(START, 30) == 7
    sent, _ = group(0, (20_000, 3))
    done = await client.train_step([sent])
    await client.stop()
    await peer
    assert done.turns == [[link.turn_digest(t, u.start, u.end) for u in t.turns] for t in sent]
    received = service.steps[0].groups[0]
    for ours, theirs in zip(sent, received, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
    arrays = [a for t in received for a in (t.token_ids, t.loss_mask, t.logprobs)]
    # Read in place: every array is a view, and all of them of the one buffer that the socket was read into.
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    assert len({id(memory_of(array)) for array in arrays}) == 1


def memory_of(array: np.ndarray) -> object:
    """The object that owns an array's memory."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


async def test_who_does_not_know_the_secret_is_refused_and_the_trainer_still_gets_in(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepting = asyncio.create_task(listener.accept())
    monkeypatch.setenv(SECRET_VARIABLE, "guessed")
    with pytest.raises(RunError, match="not this run's driver") as caught:
        await asyncio.to_thread(connect, listener.address)
    assert caught.value.reason == "trainer_link"
    assert not accepting.done()
    monkeypatch.setenv(SECRET_VARIABLE, listener.secret)
    ours = await asyncio.to_thread(connect, listener.address)
    theirs = await accepting
    ours.sendall(b"x")
    assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"x"
    ours.close()
    theirs.close()


async def test_a_stranger_who_says_nothing_keeps_nobody_waiting_and_is_let_go(listener: Listener) -> None:
    accepting = asyncio.create_task(listener.accept())
    host, port = listener.address.split(":")
    silent = await asyncio.to_thread(socket.create_connection, (host, int(port)))
    ours = await asyncio.to_thread(connect, listener.address)
    theirs = await accepting
    silent.settimeout(30)
    await asyncio.to_thread(lambda: silent.recv(32))  # the nonce
    assert await asyncio.to_thread(lambda: silent.recv(1)) == b"", "it is hung up on"
    for sock in (silent, ours, theirs):
        sock.close()


async def test_an_answer_to_another_question_proves_nothing(listener: Listener) -> None:
    """A proof that was overheard is of no use: each connection is asked something new."""
    accepting = asyncio.create_task(listener.accept())
    host, port = listener.address.split(":")

    def replay() -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            asked = sock.recv(32)
            other = bytes(32)
            assert asked != other
            sock.sendall(bytes(32) + hmac.digest(listener.secret.encode(), b"trainer" + other + bytes(32), "sha256"))
            return sock.recv(32)

    assert await asyncio.to_thread(replay) == b""
    assert not accepting.done()
    accepting.cancel()


def test_a_driver_that_cannot_prove_the_secret_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "ours")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(bytes(32))
                sock.recv(64)
                sock.sendall(bytes(32))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(RunError, match="does not know the secret"):
            connect(join_address("127.0.0.1", server.getsockname()[1]))
        thread.join()


def test_no_secret_nobody_there_or_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(RunError, match=SECRET_VARIABLE):
        connect("127.0.0.1:1")
    monkeypatch.setenv(SECRET_VARIABLE, "ours")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = join_address("127.0.0.1", server.getsockname()[1])
    for nobody in (address, "nonsense"):
        with pytest.raises(RunError, match="does not answer"):
            connect(nobody)


async def test_a_trainer_that_never_connects_has_a_name(listener: Listener) -> None:
    client = TrainerClient(listener, 30)
    with pytest.raises(DeadlineExceededError, match="the trainer process to connect"):
        await client.start(START, 0.05)
    await client.stop()


def test_addresses_of_both_kinds() -> None:
    assert join_address("10.0.0.1", 5) == "10.0.0.1:5"
    assert join_address("fd00::1", 5) == "[fd00::1]:5"
