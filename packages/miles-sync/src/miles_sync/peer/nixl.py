"""Peers through NIXL (RDMA where there is a fabric, shared memory or TCP elsewhere). Needs the `nixl` extra."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync.peer.memory import Write
from miles_sync.runs import Bytes

_log = logging.getLogger(__name__)
_PREFIX = "nixl:"


class _Handle(msgspec.Struct, frozen=True, kw_only=True):
    address: int
    num_bytes: int
    metadata: bytes


class NixlBackend:
    """Regions and writers of NIXL agents over its UCX plugin.

    Raises:
        ImportError: nixl is not installed.
        InvalidFieldError: a timeout that is not positive.
    """

    def __init__(self, timeout_s: float = 60.0, plugin: str = "UCX") -> None:
        if not timeout_s > 0:
            raise InvalidFieldError("timeout_s", timeout_s, "give a positive number of seconds")
        try:
            from nixl import _api  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ImportError("the NIXL backend needs nixl: pip install 'miles-sync[nixl]'") from error
        self._api: Any = _api
        self._timeout_s, self._plugin = timeout_s, plugin

    def expose(self, num_bytes: int) -> NixlMemory:
        """A registered region."""
        return NixlMemory(self._agent(), num_bytes)

    def writer(self) -> NixlWriter:
        """An agent that writes."""
        return NixlWriter(self._agent(), self._timeout_s)

    def _agent(self) -> Any:
        name = f"miles-{secrets.token_hex(6)}"
        return self._api.nixl_agent(name, self._api.nixl_agent_config(backends=[self._plugin]))


class NixlMemory:
    """A region of this process, registered with an agent of its own."""

    def __init__(self, agent: Any, num_bytes: int) -> None:
        self._agent = agent
        self.data: Bytes = np.empty(num_bytes, np.uint8)
        self._registered = agent.register_memory([(self.data.ctypes.data, num_bytes, 0, "weights")], "DRAM")
        handle = _Handle(address=self.data.ctypes.data, num_bytes=num_bytes, metadata=agent.get_agent_metadata())
        self.handle = _PREFIX + msgspec.json.encode(handle).decode()

    def close(self) -> None:
        """Deregister."""
        self._agent.deregister_memory(self._registered)


class NixlWriter:
    """Writes with one request per batch.

    NIXL itself finds out at once that a peer's process has ended; the deadline is for one that hangs, or a network that
    does.
    """

    def __init__(self, agent: Any, timeout_s: float) -> None:
        self._agent, self._timeout_s = agent, timeout_s
        self._peers: dict[str, tuple[str, _Handle]] = {}

    def write(self, handle: str, writes: Sequence[Write]) -> None:
        """Post the batch and wait for it.

        Raises:
            WeightUpdateError: the peer is gone, or was too slow.
        """
        name, region = self._peer(handle)
        local: list[tuple[int, int, int]] = []
        remote: list[tuple[int, int, int]] = []
        kept = [np.ascontiguousarray(write.data) for write in writes]
        for write, data in zip(writes, kept, strict=True):
            base = data.ctypes.data
            low, high = int(write.offsets.min()), int(write.offsets.max()) + write.length
            if low < 0 or high > region.num_bytes:
                raise WeightUpdateError(f"a write leaves the region of {region.num_bytes} bytes")
            for number, offset in enumerate(write.offsets.tolist()):
                local.append((base + number * write.length, write.length, 0))
                remote.append((region.address + offset, write.length, 0))
        if not local:
            return
        try:
            self._transfer(name, local, remote, kept)
        except WeightUpdateError:
            self._forget(handle)  # a connection that broke stays broken; the next write makes another one
            raise

    def keep(self, handles: Collection[str]) -> None:
        """Forget the other peers."""
        for handle in self._peers.keys() - set(handles):
            self._forget(handle)

    def close(self) -> None:
        """Forget the peers."""
        self.keep(())

    def _peer(self, handle: str) -> tuple[str, _Handle]:
        if handle not in self._peers:
            region = msgspec.json.decode(handle.removeprefix(_PREFIX), type=_Handle)
            try:
                added = self._agent.add_remote_agent(region.metadata)
            except Exception as error:  # whatever the binding raises, the peer is out of reach
                raise WeightUpdateError(f"nixl cannot reach a peer, it may have ended: {error}") from error
            self._peers[handle] = (added.decode() if isinstance(added, bytes) else str(added), region)
        return self._peers[handle]

    def _forget(self, handle: str) -> None:
        name, _ = self._peers.pop(handle)
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - boundary to the binding: it is forgotten either way
            _log.debug("nixl could not let go of %s: %s", name, error)

    def _transfer(
        self, name: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]], kept: Sequence[Bytes]
    ) -> None:
        registered = self._agent.register_memory([(d.ctypes.data, d.nbytes, 0, "") for d in kept], "DRAM")
        try:
            sources = self._agent.get_xfer_descs(local, "DRAM")
            targets = self._agent.get_xfer_descs(remote, "DRAM")
            request = self._agent.initialize_xfer("WRITE", sources, targets, name, b"")
            state = self._agent.transfer(request)
            ends = time.monotonic() + self._timeout_s
            while state == "PROC" and time.monotonic() < ends:
                time.sleep(0.0002)
                state = self._agent.check_xfer_state(request)
            self._agent.release_xfer_handle(request)
        except Exception as error:  # whatever the binding raises is a failed write
            raise WeightUpdateError(f"nixl could not write to {name}: {error}") from error
        finally:
            self._agent.deregister_memory(registered)
        if state != "DONE":
            what = f"waited {self._timeout_s:g} s for" if state == "PROC" else "nixl failed to write to"
            raise WeightUpdateError(f"{what} {name}")
