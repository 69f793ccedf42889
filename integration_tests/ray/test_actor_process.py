"""Supervision of a process below an actor, with actors in memory that fail as Ray says they do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from miles_contracts import InvalidFieldError
from miles_loop.errors import RunError
from miles_loop.processes import ProcessSpec
from miles_loop.ray_runtime.actor_process import ActorProcess, Settled
from miles_loop.ray_runtime.supervisor import Place, Supervisor

pytestmark = pytest.mark.ray


class Method:
    """A method of an actor's handle."""

    def __init__(self, work: Callable[..., Awaitable[Any]]) -> None:
        self._work = work

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._work(*args))


class Actor:
    """A supervisor in memory. `place_error` is raised instead of a place."""

    def __init__(self, node: str, place_error: Exception | None = None) -> None:
        self.node = node
        self.place_error = place_error
        self.log: list[str] = []
        self.robbed: bool | Exception = False
        self.ends: asyncio.Queue[Any] = asyncio.Queue()
        for name in ("place", "displaced", "start", "died", "crash", "stop"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    async def _place(self) -> Place:
        if self.place_error is not None:
            raise self.place_error
        return Place(self.node, "10.0.0.1", f"machine-{self.node}", 1)

    async def _displaced(self) -> bool:
        if isinstance(self.robbed, Exception):
            raise self.robbed
        return self.robbed

    async def _start(self, spec: ProcessSpec, log: str) -> int:
        self.log.append(f"start {spec.module}")
        return 1

    async def _died(self) -> tuple[str, str]:
        end = await self.ends.get()
        if isinstance(end, Exception):
            raise end
        return str(end), "the end of its log"

    async def _crash(self, why: str) -> None:
        self.log.append(f"crash {why}")

    async def _stop(self, timeout_s: float) -> None:
        self.log.append("stop")


class Scene:
    """A process over a sequence of actors; the last one is used again and again."""

    def __init__(self, tmp_path: Path, *actors: Actor, deadline_s: float = 30) -> None:
        self.actors = list(actors)
        self.made: list[Actor] = []
        self.settled = 0
        self.alive = {"a": True, "b": True}
        self.unusable: set[str] = set()
        self.process = ActorProcess(
            "engine-0", tmp_path / "log", make=self.make, settle=self.settle, nodes=self.nodes, deadline_s=deadline_s
        )

    def make(self) -> Any:
        self.made.append(self.actors[min(len(self.made), len(self.actors) - 1)])
        return self.made[-1]

    async def settle(self, actor: Any, place: Place) -> Settled:
        if place.node_id in self.unusable:
            raise InvalidFieldError("run_dir", "r", f"{place} does not see it")
        self.settled += 1
        url = f"http://{place.node_id}:{self.settled}"
        return Settled(ProcessSpec(name="engine-0", module=f"on_{place.node_id}"), url)

    async def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": alive} for name, alive in self.alive.items()]


async def test_a_child_whose_port_is_taken_is_started_on_another(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Actor("a"))
    await scene.process.start()
    scene.actors[0].ends.put_nowait("ended with status 2")
    await scene.process.died()
    scene.actors[0].robbed = True
    assert await scene.process.displaced()
    await scene.process.start()
    assert scene.process.url == "http://a:2"
    scene.actors[0].robbed = RayActorError()
    assert not await scene.process.displaced(), "not known of a lost actor"
    await scene.process.stop(1)
    assert not await scene.process.displaced()


async def test_a_supervisor_keeps_a_port_for_its_child() -> None:
    supervisor = Supervisor()
    assert not await supervisor.displaced()
    port = await supervisor.keep_port("127.0.0.1")
    assert not await supervisor.displaced()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        assert await supervisor.displaced()
        other = await supervisor.keep_port("127.0.0.1")
        assert other != port
        assert not await supervisor.displaced()


async def test_a_child_that_ends_is_started_again_where_it_was(tmp_path: Path) -> None:
    actor = Actor("a")
    scene = Scene(tmp_path, actor)
    await scene.process.start()
    assert (scene.process.running, scene.process.url) == (True, "http://a:1")
    actor.ends.put_nowait("ended with status 1")
    death = await scene.process.died()
    assert (death.reason, death.how, death.name) == ("process_died", "ended with status 1", "engine-0")
    assert "the end of its log" in str(scene.process.death())
    assert not scene.process.running
    await scene.process.start()
    assert scene.process.running
    assert (actor.log, len(scene.made)) == (["start on_a", "start on_a"], 1)
    await scene.process.stop(1)


async def test_a_lost_actor_is_made_anew_and_may_be_elsewhere(tmp_path: Path) -> None:
    first, second = Actor("a"), Actor("b")
    scene = Scene(tmp_path, first, second)
    (tmp_path / "log").write_text("its last words\n")
    await scene.process.start()
    first.ends.put_nowait(ActorDiedError())
    death = await scene.process.died()
    assert "was lost with its actor on machine-a" in death.how
    assert "its last words" in str(death)
    await scene.process.start()
    assert (scene.process.url, second.log) == ("http://b:2", ["start on_b"])
    await scene.process.stop(1)


async def test_a_lost_node_is_named(tmp_path: Path) -> None:
    actor = Actor("a")
    scene = Scene(tmp_path, actor)
    await scene.process.start()
    scene.alive["a"] = False
    actor.ends.put_nowait(ActorDiedError())
    assert (await scene.process.died()).how == "was lost with its node machine-a (10.0.0.1, node a)"
    await scene.process.stop(1)


async def test_out_of_reach_is_not_dead(tmp_path: Path) -> None:
    actor = Actor("a")
    scene = Scene(tmp_path, actor)
    await scene.process.start()
    actor.ends.put_nowait(ActorUnavailableError("socket closed", None))
    actor.ends.put_nowait("ended with status 3")
    assert (await scene.process.died()).how == "ended with status 3"
    assert len(scene.made) == 1
    await scene.process.stop(1)


async def test_placing_is_tried_again_until_ray_has_room(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Actor("a", ActorDiedError()), Actor("b"))
    await asyncio.gather(scene.process.reserve(), scene.process.reserve())
    assert [actor.node for actor in scene.made] == ["a", "b"]
    assert scene.process.place.node_id == "b"
    await scene.process.stop(1)


async def test_no_room_in_time_has_a_name(tmp_path: Path) -> None:
    scene = Scene(tmp_path, Actor("a", ActorDiedError()), deadline_s=0.2)
    with pytest.raises(RunError, match="no place for engine-0 within 0.2 s; the last attempt") as caught:
        await scene.process.start()
    assert (caught.value.reason, caught.value.resumable) == ("no_room", True)
    await scene.process.stop(1)


async def test_a_node_that_cannot_be_used_is_a_bad_setting_first_and_no_room_later(tmp_path: Path) -> None:
    first, second = Actor("a"), Actor("b")
    scene = Scene(tmp_path, first, second)
    scene.unusable = {"a", "b"}
    with pytest.raises(InvalidFieldError, match="does not see it"):
        await scene.process.reserve()
    scene.made.clear()
    scene.unusable = {"b"}
    await scene.process.start()
    first.ends.put_nowait(ActorDiedError())
    await scene.process.died()
    with pytest.raises(RunError, match="cannot run where Ray placed it now") as caught:
        await scene.process.start()
    assert caught.value.reason == "no_room"
    assert (await scene.process.died()).name == "engine-0", "still the earlier death: whoever waits tries again"
    await scene.process.stop(1)


async def test_a_stopped_process_has_not_died_and_a_crash_is_passed_on(tmp_path: Path) -> None:
    actor = Actor("a")
    scene = Scene(tmp_path, actor)
    scene.process.crash("on purpose")  # nothing is there yet
    await scene.process.start()
    died = asyncio.create_task(scene.process.died())
    scene.process.crash("on purpose")
    await scene.process.stop(1)
    actor.ends.put_nowait("ended with status 0")
    await asyncio.sleep(0.05)
    assert not died.done()
    assert actor.log == ["start on_a", "crash on purpose", "stop"]
    died.cancel()


async def test_an_actor_that_is_gone_can_be_stopped(tmp_path: Path) -> None:
    actor = Actor("a")
    scene = Scene(tmp_path, actor)
    await scene.process.start()

    async def gone(timeout_s: float) -> None:
        raise ActorDiedError()

    actor.stop = Method(gone)  # type: ignore[attr-defined]
    await scene.process.stop(1)
    await scene.process.stop(1)
