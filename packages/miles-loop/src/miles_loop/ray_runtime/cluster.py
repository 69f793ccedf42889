"""Joining a Ray cluster, reserving room on it, and saying in words why that did not work."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from miles_contracts import InvalidFieldError
from miles_loop.config import RayConfig
from miles_loop.errors import RunError
from miles_loop.ray_runtime.placement import Bundle, shortage
from miles_loop.ray_runtime.supervisor import node_address

_LOCAL = "local"
"""Ray's word for a new cluster on this machine."""
_RUNNING = "auto"
"""Ray's word for the cluster that this machine is part of."""
_CONNECT_S = 10.0
_JOIN_S = 120.0
_PATIENCE_S = 3.0
"""After which a person is told that the run waits for room."""


class Cluster:
    """A joined cluster and the room that was reserved on it.

    Args:
        config: which cluster, and how to spread.
        on_event: told, in words, when room is waited for.
    """

    def __init__(self, config: RayConfig, on_event: Callable[[str], None]) -> None:
        self._config = config
        self._on_event = on_event
        self._group: PlacementGroup | None = None
        self._left = threading.Event()

    @property
    def group(self) -> PlacementGroup:
        """The reserved room; bundle i is the i-th that was asked for."""
        assert self._group is not None
        return self._group

    async def join(self, cpus: float = 0.0) -> str:
        """Connect; returns the address under which the nodes reach this machine.

        Args:
            cpus: that the run asks for. A cluster that is started for it here has so many, whatever the machine has:
                its processes then share them, as those of a local run do.

        Raises:
            InvalidFieldError: no cluster answers at the address, or it cannot be used from here.
        """
        address = self._config.address or os.environ.get("RAY_ADDRESS") or _LOCAL
        await asyncio.to_thread(_check_address, address)
        if ray.is_initialized():
            raise RunError("ray_in_use", "this process is connected to a Ray cluster already")
        loop = asyncio.get_running_loop()
        joined: asyncio.Future[None] = loop.create_future()

        def join() -> None:
            try:
                _join(address, cpus)
            except Exception as error:  # noqa: BLE001 - main of a thread: every error is an answer
                loop.call_soon_threadsafe(_tell, joined, error)
                return
            loop.call_soon_threadsafe(_tell, joined, None)
            # Linux ends a cluster that was started here with the thread that started it.
            self._left.wait()

        # In a thread: it takes seconds, and in the main thread Ray would put its own handler of SIGTERM in the place of
        # the run's. Of its own: Ray may try for ever, and nobody waits for it at the end of the process.
        threading.Thread(target=join, name="ray-join", daemon=True).start()
        try:
            async with asyncio.timeout(_JOIN_S):
                await joined
        except TimeoutError:
            raise _unreachable(address, f"no answer within {_JOIN_S:g} s") from None
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            raise _unreachable(address, str(error).strip().splitlines()[0]) from error
        _keep_sigterm()
        return node_address()

    async def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Wait until the cluster holds room for all bundles.

        Raises:
            RunError: `no_room`, with what is missing.
        """
        self._group = placement_group(
            [bundle.resources for bundle in bundles], strategy=self._config.placement.value.upper(), name="miles"
        )
        ready = asyncio.ensure_future(_await(self._group.ready()))
        try:
            done, _ = await asyncio.wait((ready,), timeout=min(_PATIENCE_S, self._config.placement_timeout_s))
            if not done:
                self._on_event(f"waiting for room on the Ray cluster: {await self._why(bundles)}")
                rest = max(self._config.placement_timeout_s - _PATIENCE_S, 0.0)
                done, _ = await asyncio.wait((ready,), timeout=rest)
            if not done:
                raise RunError(
                    "no_room",
                    f"the Ray cluster had no room within {self._config.placement_timeout_s:g} s: "
                    f"{await self._why(bundles)}; add nodes, ask for less (runtime.ray.*), or raise "
                    "runtime.ray.placement_timeout_s",
                )
            ready.result()
        finally:
            ready.cancel()

    async def _why(self, bundles: Sequence[Bundle]) -> str:
        nodes = [node["Resources"] for node in await self.nodes() if node["Alive"]]
        return shortage(bundles, nodes, self._config.placement) or "other jobs use what it has"

    async def nodes(self) -> list[dict[str, Any]]:
        """What Ray says of every node, dead ones included."""
        return list(await asyncio.to_thread(ray.nodes))

    async def close(self) -> None:
        """Give the room back and leave; a cluster that this process started ends."""
        if ray.is_initialized():
            await asyncio.to_thread(self._leave)
        self._group = None
        self._left.set()

    def _leave(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def _check_address(address: str) -> None:
    """Refuse what Ray would try to reach for a long time.

    Raises:
        InvalidFieldError: an address of the client protocol, no address, or nobody listens there.
    """
    if "://" in address:
        raise InvalidFieldError(
            "runtime.ray.address",
            address,
            "the driver talks to engines directly and has to run inside the cluster: give host:port on one of its "
            "nodes, or submit the command with `ray job submit`",
        )
    if address in (_LOCAL, _RUNNING):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidFieldError("runtime.ray.address", address, f"use host:port, or {_RUNNING}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error


def _keep_sigterm() -> None:
    """Take SIGTERM back from Ray's native code, which would abort the process three seconds after it: a run that was
    told to stop finishes its step and writes a checkpoint first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _join(address: str, cpus: float) -> None:
    ray.init(
        address=address,
        num_cpus=max(math.ceil(cpus), os.cpu_count() or 1) if address == _LOCAL else None,
        namespace="miles",
        log_to_driver=False,
        logging_level=logging.ERROR,
        include_dashboard=False if address == _LOCAL else None,
    )


def _tell(joined: asyncio.Future[None], error: Exception | None) -> None:
    if joined.done():
        return
    if error is None:
        joined.set_result(None)
    else:
        joined.set_exception(error)


def _unreachable(address: str, why: str) -> InvalidFieldError:
    remedy = (
        f"no Ray cluster can be joined there ({why}); start one with `ray start --head`, or leave the address out "
        "for a cluster of this machine alone"
    )
    return InvalidFieldError("runtime.ray.address", address, remedy)


async def _await(reference: Any) -> Any:
    return await reference
