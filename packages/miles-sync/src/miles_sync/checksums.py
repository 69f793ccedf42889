"""Checksums of what other processes are to store, computed from the canonical tensors as they are sent.

SGLang's checksum of a parameter on the CPU is the beginning of the SHA-256 of its bytes. A hash takes bytes in order,
and tensors are sent sorted by name: a part that comes before its turn (a key projection before the query's, expert 10
before expert 2) waits as a view, so no more is held than the parts of one fused parameter. Hashing has a thread of its
own, beside the sending; it lets the interpreter go on while it hashes.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from miles_contracts import InvalidFieldError, TensorSpec, WeightUpdateError
from miles_sync.convert import box_of_canonical
from miles_sync.group import Lane
from miles_sync.layout import Fragment, RankLayout
from miles_sync.tensors import flat_bytes, torch_dtype

_CHUNK = 8 << 20
"""Bytes that are brought into host memory, or another dtype, at once."""
_HEX = 16
"""Hexadecimal digits of SGLang's checksums."""


class ParameterSums:
    """Checksums of the stored tensors of ranks; give every canonical tensor once, then take the result.

    Args:
        ranks: what each rank stores; a dtype other than the sent one is a cast that each rank does. Bytes of a stored
            tensor that no fragment covers are zero.
        backlog_bytes: tensors that wait for the hashing thread; more, and the sender waits for it.

    Raises:
        InvalidFieldError: a fragment is no consecutive part of what is stored.
    """

    def __init__(self, ranks: Sequence[RankLayout], backlog_bytes: int) -> None:
        self._backlog_bytes = backlog_bytes
        self._lane = Lane("checksums")
        self._backlog: deque[tuple[Future[None], int]] = deque()
        self._backlog_size = 0  # bytes of all that is in it
        self._sums: list[dict[str, _Sum]] = []
        self._wanted: dict[str, list[tuple[_Sum, int]]] = {}
        same: dict[object, _Sum] = {}
        for rank in ranks:
            by_stored: dict[str, list[Fragment]] = {spec.name: [] for spec in rank.stored}
            for fragment in rank.fragments:
                by_stored[fragment.stored].append(fragment)
            self._sums.append({s.name: self._sum(s, by_stored[s.name], same) for s in rank.stored})
        self.seconds = 0.0
        """Spent hashing so far."""
        self.waited_s = 0.0
        """That sender and result have waited for it."""
        self.num_bytes = 0
        """Hashed so far."""
        self.peak_bytes = 0
        """The most that waited for its turn."""
        self._waiting_bytes = 0

    def _sum(self, spec: TensorSpec, fragments: Sequence[Fragment], same: dict[object, _Sum]) -> _Sum:
        """One for all ranks that store the same."""
        key = (spec.name, spec.dtype, spec.shape, tuple(fragments))
        if key not in same:
            same[key] = made = _Sum(spec, fragments)
            for number, (_, fragment) in enumerate(made.parts):
                self._wanted.setdefault(fragment.name, []).append((made, number))
        return same[key]

    def tap(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors; each is noted when it is taken."""
        for name, tensor in tensors:
            self.put(name, tensor)
            yield name, tensor

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Note one canonical tensor; it must not change before `result`."""
        wanted = self._wanted.get(name)
        if not wanted:
            return
        num_bytes = tensor.numel() * tensor.element_size()
        while self._backlog and self._backlog_size + num_bytes > self._backlog_bytes:
            self._wait()
        self._backlog.append((self._lane.submit(partial(self._hash, wanted, tensor)), num_bytes))
        self._backlog_size += num_bytes

    def result(self) -> list[dict[str, str]]:
        """Checksum by stored tensor, rank by rank. Waits for the hashing thread.

        Raises:
            WeightUpdateError: a tensor was not given.
        """
        while self._backlog:
            self._wait()
        return [{name: made.checksum() for name, made in rank.items()} for rank in self._sums]

    def _wait(self) -> None:
        """For the oldest of what has yet to be hashed."""
        begun = time.perf_counter()
        oldest, num_bytes = self._backlog.popleft()
        self._backlog_size -= num_bytes
        oldest.result()
        self.waited_s += time.perf_counter() - begun

    def close(self) -> None:
        """Nothing more will be asked for."""
        for future, _ in self._backlog:
            future.cancel()
        self._backlog.clear()
        self._lane.close()

    def _hash(self, wanted: Sequence[tuple[_Sum, int]], tensor: torch.Tensor) -> None:
        begun = time.perf_counter()
        for made, number in wanted:
            before = made.waiting_bytes
            self.num_bytes += made.offer(number, tensor)
            self._waiting_bytes += made.waiting_bytes - before
        self.peak_bytes = max(self.peak_bytes, self._waiting_bytes)
        self.seconds += time.perf_counter() - begun


class _Sum:
    """The hash of one stored tensor, and the parts that have come before their turn."""

    def __init__(self, spec: TensorSpec, fragments: Sequence[Fragment]) -> None:
        self._spec = spec
        self._dtype = torch_dtype(spec.dtype)
        self._element = spec.num_bytes // max(spec.num_elements, 1)
        self.parts = sorted(((self._first_byte(f), f) for f in fragments), key=lambda part: part[0])
        self._hash = hashlib.sha256()
        self._position = 0
        self._turn = 0
        self._waiting: dict[int, torch.Tensor] = {}
        self.waiting_bytes = 0
        """Of the parts that have come before their turn."""

    def _first_byte(self, fragment: Fragment) -> int:
        shape, extent = self._spec.shape, (1,) * (len(fragment.at) - len(fragment.shape)) + fragment.shape
        # Consecutive: some dimension is cut, all before it have extent 1, all after it are whole.
        cut = next((d for d, size in enumerate(extent) if size != 1), len(extent))
        if any(a != b for a, b in zip(extent[cut + 1 :], shape[cut + 1 :], strict=True)):
            remedy = f"{fragment.name} must lie in consecutive bytes of it"
            raise InvalidFieldError("ranks", self._spec.name, remedy)
        place = 0
        for at, size in zip(fragment.at, shape, strict=True):
            place = place * size + at
        return place * self._element

    def offer(self, number: int, tensor: torch.Tensor) -> int:
        """Take a part, and those that waited for it; the bytes that were hashed."""
        fragment = self.parts[number][1]
        box = self._waiting[number] = box_of_canonical(tensor, fragment)
        self.waiting_bytes += box.numel() * box.element_size()
        before = self._position
        while self._turn in self._waiting:
            box = self._waiting.pop(self._turn)
            self.waiting_bytes -= box.numel() * box.element_size()
            self._fill(self.parts[self._turn][0])
            self._take(box)
            self._turn += 1
        return self._position - before

    def checksum(self) -> str:
        """SGLang's way to write it."""
        if self._turn < len(self.parts):
            raise WeightUpdateError("was not among the tensors that were sent", tensor=self.parts[self._turn][1].name)
        self._fill(self._spec.num_bytes)
        return self._hash.hexdigest()[:_HEX]

    def _fill(self, position: int) -> None:
        """Padding."""
        while self._position < position:
            zeros = bytes(min(position - self._position, _CHUNK))
            self._hash.update(zeros)
            self._position += len(zeros)

    def _take(self, box: torch.Tensor) -> None:
        rows = box if box.dim() else box.reshape(1)
        at_once = len(rows)
        if box.dtype is not self._dtype or box.device.type != "cpu" or not box.is_contiguous():
            at_once = max(1, _CHUNK // max(rows[0].numel() * self._element, 1))
        for begin in range(0, len(rows), at_once):
            data = flat_bytes(rows[begin : begin + at_once].to(self._dtype).cpu()).numpy()
            self._hash.update(data.data)
            self._position += len(data)
