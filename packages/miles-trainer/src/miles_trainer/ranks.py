"""The ranks of a trainer group: what each does alone, what all do together, and how an error of one ends a step on all.

    rank 0   own share --.                .-- sum of gradients --> the same update
    rank 1   own share ---> meet: all or none                       on every rank
    rank 2   own share --'                `-- sum of gradients --> ...

Nobody enters a collective before all have met: a rank that failed tells the others why, and one that does not come is
named. Sums are taken in the order of ranks, so that all ranks see the same bits.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_trainer.errors import (
    NonFiniteError,
    NonFiniteReport,
    RankFailedError,
    RankGoneError,
    RankLateError,
    RankLostError,
    RanksDivergedError,
    first_names,
)

BUCKET_BYTES = 32 * 2**20
"""Gradients are summed in pieces of about this size: a collective each, the next one filled meanwhile."""


_NEARLY = 0.9
"""Share of the deadline after which a wait that failed is taken for one that was too long."""


class Ranks(Protocol):
    """What a backend asks of the group that it belongs to."""

    rank: int
    size: int
    wait_s: float
    """Seconds spent at meetings since `restart_clock`: for slower ranks, and for the messages themselves."""
    reduce_s: float
    """Seconds spent summing gradients since `restart_clock`."""

    def use(self, device: torch.device) -> None:
        """Gradients will be on this device."""

    def alone(self, what: str) -> Any:
        """A block in which this rank works alone; it ends on all ranks, or raises on all."""

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks of a small tensor."""

    def largest(self, value: Tensor) -> Tensor:
        """Largest over ranks of a small tensor, element by element."""

    def texts(self, text: str) -> list[str]:
        """What every rank says, in the order of ranks."""

    def sum_gradients(self, masters: Mapping[str, Tensor]) -> None:
        """Replace the gradients of these tensors by their sums over ranks."""

    def compare(self, found: Mapping[str, str], what: str) -> None:
        """Require that all ranks hold the same, by the fingerprints of named parts."""

    def restart_clock(self) -> None:
        """Begin counting seconds anew."""


class OneRank:
    """A group of one: nothing is exchanged, nothing is changed."""

    rank, size = 0, 1
    wait_s = reduce_s = 0.0

    def use(self, device: torch.device) -> None:
        """Nothing to prepare."""

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Errors pass through."""
        yield

    def total(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def largest(self, value: Tensor) -> Tensor:
        """The value."""
        return value

    def texts(self, text: str) -> list[str]:
        """The text."""
        return [text]

    def sum_gradients(self, masters: Mapping[str, Tensor]) -> None:
        """They are the sums."""

    def compare(self, found: Mapping[str, str], what: str) -> None:
        """There is nobody to differ from."""

    def restart_clock(self) -> None:
        """Nothing is counted."""


def meeting_point(host: str, port: int | None = None, *, timeout_s: float) -> Any:
    """The store in which the ranks of a group find each other; its `port` is where.

    Args:
        host: address of rank 0's machine.
        port: where rank 0 serves it; None serves it here, at this address alone, on a port that was free.
        timeout_s: for the others to reach it, and for every wait on it.

    Raises:
        RankLateError: nobody serves it there.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    wait = timedelta(seconds=timeout_s)
    if port is None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            server.bind((host, 0))
            number, descriptor = server.getsockname()[1], server.detach()
        # Left to itself it would listen on every address of the machine.
        return store(host, number, is_master=True, timeout=wait, wait_for_workers=False, master_listen_fd=descriptor)
    try:
        return store(host, port, is_master=False, timeout=wait)
    except dist.DistError as error:
        raise RankLateError(f"rank 0 of the trainer group cannot be reached at {host}:{port}: {error}") from error


class _Problem(msgspec.Struct, frozen=True):
    """What a rank that failed tells the others."""

    kind: str
    message: str
    report: NonFiniteReport | None = None


class TorchRanks:
    """Ranks that meet over gloo; gradients are summed by gloo on CPUs and by nccl on GPUs.

    Args:
        store: of `torch.distributed`, shared by the ranks of this group alone.
        rank: of this process.
        size: number of ranks, at least 2.
        timeout_s: how long the ranks wait for one of them.
        host: address of this machine as the other ranks reach it; "" leaves the choice to gloo.

    Raises:
        RankLateError: not all ranks came.
    """

    def __init__(self, store: Any, rank: int, size: int, *, timeout_s: float, host: str = "") -> None:
        self.rank, self.size = rank, size
        self.wait_s = self.reduce_s = 0.0
        self._timeout_s = timeout_s
        self._store = store
        gloo: Any = dist.ProcessGroupGloo  # not all of it is declared
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=host)]
        try:
            self._group = gloo(dist.PrefixStore("meet", store), rank, size, options)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise RankLateError(f"not all of {size} trainer ranks met within {timeout_s:g} s: {error}") from error
        self._gradients: Any = self._group

    def use(self, device: torch.device) -> None:
        """Gradients will be on this device; for a GPU all ranks join a second group."""
        if device.type == "cpu":
            return
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        store = dist.PrefixStore("gradients", self._store)  # type: ignore[attr-defined]
        self._gradients = dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """A block without collectives; at its end all ranks meet.

        Args:
            what: the rank does there, for the error about one that does not come.

        Raises:
            NonFiniteError: what some rank found.
            RankFailedError: another rank failed for any other reason.
            RankLostError: a rank did not come.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - task supervisor: told to all ranks and raised below
            problem = error
        self._meet(what, problem)

    def _meet(self, what: str, problem: Exception | None) -> None:
        began = time.perf_counter()
        try:
            try:
                self._group.monitored_barrier(timedelta(seconds=self._timeout_s), wait_all_ranks=True)
            except RuntimeError as error:
                raise self._lost(error, what, began) from problem or error
            told = self._exchange(b"" if problem is None else msgspec.json.encode(_described(problem)))
        finally:
            self.wait_s += time.perf_counter() - began
        if problem is not None:
            raise problem
        for rank, message in enumerate(told):
            if message:
                raise _error_of(rank, msgspec.json.decode(message, type=_Problem))

    def total(self, values: Tensor) -> Tensor:
        """Sum over ranks of a small tensor, taken in the order of ranks, on the device it came from."""
        return self._gathered(values).sum(0).to(values.device)

    def largest(self, value: Tensor) -> Tensor:
        """Largest over ranks of a small tensor, element by element."""
        return self._gathered(value).amax(0).to(value.device)

    def texts(self, text: str) -> list[str]:
        """What every rank says, in the order of ranks."""
        return [message.decode() for message in self._exchange(text.encode())]

    def sum_gradients(self, masters: Mapping[str, Tensor]) -> None:
        """Replace gradients by their sums over ranks; a tensor that got one nowhere keeps none.

        Args:
            masters: the same names in the same order on every rank.

        Raises:
            RankLostError: a rank was lost meanwhile.
        """
        began = time.perf_counter()
        here = torch.tensor([m.grad is not None for m in masters.values()], dtype=torch.uint8)
        anywhere = self._gathered(here).any(0).tolist()
        kept = [m for m, one in zip(masters.values(), anywhere, strict=True) if one]
        try:
            running = [self._start_sum(bucket) for bucket in buckets(kept, BUCKET_BYTES)]
            for bucket, flat, work in running:
                work.wait()
                for master, part in zip(bucket, _parts(flat, bucket), strict=True):
                    master.grad = part.view(master.shape)
        except RuntimeError as error:
            raise self._lost(error, "the sum of gradients", began) from error
        self.reduce_s += time.perf_counter() - began

    def _start_sum(self, bucket: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Any]:
        first = bucket[0]
        flat = torch.empty(sum(m.numel() for m in bucket), dtype=first.dtype, device=first.device)
        for master, part in zip(bucket, _parts(flat, bucket), strict=True):
            if master.grad is None:
                part.zero_()
            else:
                part.copy_(master.grad.reshape(-1))
            master.grad = None  # its memory is free before the next bucket is made
        return bucket, flat, self._gradients.allreduce([flat])

    def compare(self, found: Mapping[str, str], what: str) -> None:
        """Require that all ranks hold the same.

        Args:
            found: fingerprints without spaces, by name; the same names in the same order on every rank.
            what: they are of.

        Raises:
            RanksDivergedError: naming those that differ from rank 0, and in what.
        """
        told = [text.split(" ") for text in self.texts(" ".join(found.values()))]
        different = [rank for rank, one in enumerate(told) if one != told[0]]
        if different:
            pairs = [(told[0], told[rank]) for rank in different]
            names = [name for i, name in enumerate(found) if any(ours[i] != theirs[i] for ours, theirs in pairs)]
            where = first_names(names)
            raise RanksDivergedError(f"{what} of trainer ranks {different} differ from those of rank 0, in {where}")

    def restart_clock(self) -> None:
        """Begin counting seconds anew."""
        self.wait_s = self.reduce_s = 0.0

    def _exchange(self, message: bytes) -> list[bytes]:
        sizes = self._gathered(torch.tensor([len(message)])).flatten().tolist()
        longest = max(sizes)
        if not longest:
            return [b""] * self.size
        padded = np.zeros(longest, dtype=np.uint8)
        padded[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        rows = self._gathered(torch.from_numpy(padded)).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _gathered(self, values: Tensor) -> Tensor:
        """The values of every rank, [size, ...], in host memory."""
        mine = values.detach().cpu().contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        began = time.perf_counter()
        try:
            self._group.allgather([rows], [mine]).wait()
        except RuntimeError as error:
            raise self._lost(error, "an exchange of sums", began) from error
        return torch.stack(rows)

    def _lost(self, error: RuntimeError, what: str, began: float) -> RankLostError:
        """Our words for what torch says, which sounds alike for a rank that hangs and for one that has ended."""
        late = time.perf_counter() - began > _NEARLY * self._timeout_s
        why = f"did not come within {self._timeout_s:g} s" if late else "hung up"
        kind = RankLateError if late else RankGoneError
        text = " ".join(str(error).split())[:300]
        return kind(f"a trainer rank {why} (rank {self.rank} of {self.size} waited for {what}): {text}")


def _parts(flat: Tensor, bucket: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.split(flat, [m.numel() for m in bucket])


def buckets(masters: Sequence[Tensor], max_bytes: int) -> Iterator[Sequence[Tensor]]:
    """Runs of tensors of one dtype and device, each of at most `max_bytes`, or of one tensor."""
    run: list[Tensor] = []
    size = 0
    for master in masters:
        num_bytes = master.numel() * master.element_size()
        if run and (size + num_bytes > max_bytes or (run[0].dtype, run[0].device) != (master.dtype, master.device)):
            yield run
            run, size = [], 0
        run.append(master)
        size += num_bytes
    if run:
        yield run


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Sums of the bit patterns of tensors: cheap, on their device, and another one when a single bit differs."""
    sums = [t.detach().reshape(-1).view(_SIGNED[t.element_size()]).sum(dtype=torch.int64) for t in tensors.values()]
    found = torch.stack(sums).tolist() if sums else []
    return {name: f"{one:x}" for name, one in zip(tensors, found, strict=True)}


def _described(problem: Exception) -> _Problem:
    report = problem.report if isinstance(problem, NonFiniteError) else None
    return _Problem(type(problem).__name__, str(problem), report)


def _error_of(rank: int, problem: _Problem) -> Exception:
    if problem.report is not None:
        return NonFiniteError(problem.report)
    return RankFailedError(f"trainer rank {rank} failed with {problem.kind}: {problem.message}")
