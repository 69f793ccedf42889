"""Groups of processes for collectives: opened per fleet, bounded in time, given up as a whole.

A collective cannot be taken back: a rank that has entered it waits for the others. So collectives run on a thread of
their own while the control plane keeps its deadlines, and a group with an unfinished collective is abandoned and
replaced by one with another name.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from miles_contracts import DeadlineExceededError, InvalidFieldError, update_group_prefix


class Group(Protocol):
    """What the transports need of a communicator."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        """Start filling `tensor` on every rank with the root's; the result waits for this rank's part.

        Several may be under way; every rank has to start them in the same order.
        """

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start sending to a rank; the result waits for it."""

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start receiving from a rank; the result waits for it."""

    def close(self) -> None:
        """Give the group up, finished or not."""


class Meeting:
    """Where the ranks of groups find each other: one key-value server, started by the owner.

    Args:
        host, port: of the server; port 0 picks a free one (see `port`).
        owner: True in the process that serves it.
        timeout_s: for every wait on it.

    Raises:
        DeadlineExceededError: the port cannot be served.
    """

    def __init__(self, host: str, port: int, *, owner: bool, timeout_s: float) -> None:
        self.host, self.timeout_s = host, timeout_s
        self.port = port
        if owner:
            self._server = self._connect(owner=True)
            self.port = self._server.port

    def _connect(self, *, owner: bool = False) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                self.host, self.port, is_master=owner, timeout=timeout, wait_for_workers=False
            )
        except dist.DistError as error:
            remedy = "is the trainer up, and the address reachable from here?"
            where = f"the meeting point {self.host}:{self.port}"
            raise DeadlineExceededError(where, self.timeout_s, remedy) from error

    def open(self, name: str, rank: int, size: int, backend: str = "gloo") -> Group:
        """Join the group of this name; returns when all `size` ranks have.

        Raises:
            DeadlineExceededError: a rank did not come in time, or the server cannot be reached.
            InvalidFieldError: an unknown backend.
        """
        timeout = timedelta(seconds=self.timeout_s)
        prefix = update_group_prefix(name, "cpu" if backend == "gloo" else "cuda")
        # A connection for each group: a wait for ranks that never come would hold up the next group on a shared one.
        store = dist.PrefixStore(prefix, self._connect())  # type: ignore[attr-defined]
        try:
            if backend == "gloo":
                return _TorchGroup(dist.ProcessGroupGloo(store, rank, size, timeout), self)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return _TorchGroup(dist.ProcessGroupNCCL(store, rank, size, options), self)
        except RuntimeError as error:
            remedy = "every rank of the group has to join; see the missing rank's log"
            raise DeadlineExceededError(f"all {size} ranks of group {name}", self.timeout_s, remedy) from error
        raise InvalidFieldError("backend", backend, "use gloo or nccl")


class _TorchGroup:
    """A `torch.distributed` process group outside the default one, so that it can come and go.

    It keeps its meeting point: ranks that are slower than the server's have still to find each other there.
    """

    def __init__(self, group: Any, meeting: Meeting) -> None:
        self._group, self._meeting = group, meeting

    def broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self._group.broadcast([tensor], options)
        return lambda: _wait(work, tensor.device)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        work = self._group.send([tensor], rank, 0)
        return lambda: _wait(work, tensor.device)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], None]:
        work = self._group.recv([tensor], rank, 0)
        return lambda: _wait(work, tensor.device)

    def close(self) -> None:
        if self._group is not None:
            held, self._group = [self._group], None
            threading.Thread(target=_end, args=(held,), name="end-group", daemon=True).start()


def _end(held: list[Any]) -> None:
    """Drop the last reference to a group: that ends its connections, and waits for a collective that hangs."""
    held.pop().abort()


def _wait(work: Any, device: torch.device) -> None:
    work.wait()
    if device.type == "cuda":
        # NCCL's wait orders the stream behind the collective; here it has to be over, for its memory is used again.
        torch.cuda.current_stream(device).synchronize()


class Lane:
    """Runs calls one after the other on a daemon thread, which does not keep the process alive when one hangs."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - task supervisor: handed to whoever waits
                future.set_exception(error)
            del item, future, call  # or what they refer to would live until the next call
