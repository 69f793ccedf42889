"""One bucket on its way out: what is sent from where it is, what is packed first, and where it all lies.

A collective costs a fixed time and packing costs a copy. So tensors that lie side by side in memory, as those of an
arena or of a gather do, go out together from where they are; so does a large tensor by itself; all others are packed.

    memory     [a b c d]      [e]   [f]     [g.......]
    transfers  [a b c d] [g.......] [e f]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from miles_contracts.alignment import aligned
from miles_sync.buckets import Piece
from miles_sync.tensors import digest_bytes

IN_PLACE_BYTES = 8 << 20
"""Memory of this size is sent from where it is. With gloo, a collective of its own costs more processor time than
copying 4 MiB and less than copying 16 MiB."""

TRANSFER_BYTES = 16 << 20
"""A transfer ends with the tensor that fills it: what has come is verified while the next one comes, and is still in
a cache then."""


class Outgoing:
    """Takes the pieces of one bucket in order and starts transfers as they fill.

    Args:
        start: starts sending flat uint8 bytes, which do not change until the bucket is over.
        memory: uint8 for packing, aligned, as large as the bucket, on the device that is sent from.
        digests: whether pieces are digested.
        in_place_bytes, transfer_bytes: see the constants.

    Attributes:
        offsets: byte of the bucket at which each piece lies, in the order of the pieces.
        transfers: (first byte, length) of what was started.
    """

    def __init__(
        self,
        start: Callable[[torch.Tensor], None],
        memory: torch.Tensor,
        *,
        digests: bool,
        in_place_bytes: int = IN_PLACE_BYTES,
        transfer_bytes: int = TRANSFER_BYTES,
    ) -> None:
        self._start_sending, self._memory, self._digests = start, memory, digests
        self._in_place_bytes, self._transfer_bytes = in_place_bytes, transfer_bytes
        self.offsets: list[int] = []
        self.transfers: list[tuple[int, int]] = []
        self._end = 0  # of the bucket so far
        self._run = Run()
        self._packed: list[tuple[int, int]] = []  # (number of the piece, its length) in the open packed transfer
        self._packed_from = self._packed_to = 0  # bytes of the memory that this transfer has

    def put(self, piece: Piece, data: torch.Tensor) -> str | None:
        """Take a piece's flat uint8 bytes, on their device; their digest."""
        number = len(self.offsets)
        self.offsets.append(-1)
        found = digest_bytes(data.cpu().numpy()) if self._digests else None
        if not self._run.add(number, data):
            self._close_run()
            self._run.add(number, data)
        if self._run.num_bytes >= self._transfer_bytes:
            self._close_run()
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes from the bucket's start to the end of its last transfer."""
        return max((begin + length for begin, length in self.transfers), default=0)

    def finish(self) -> None:
        """No more pieces."""
        self._close_run()
        self._close_packed()

    def _close_run(self) -> None:
        run, self._run = self._run, Run()
        if run.num_bytes >= self._in_place_bytes:
            for number, offset in run.offsets:
                self.offsets[number] = self._end + offset
            self._send(run.joined())
            return
        for number, data in run.pieces:
            self._pack(number, data)

    def _pack(self, number: int, data: torch.Tensor) -> None:
        at = aligned(self._packed_to)
        self._memory[at : at + len(data)].copy_(data)
        self._packed.append((number, at - self._packed_from))
        self._packed_to = at + len(data)
        if self._packed_to - self._packed_from >= self._transfer_bytes:
            self._close_packed()

    def _close_packed(self) -> None:
        for number, offset in self._packed:
            self.offsets[number] = self._end + offset
        if self._packed:
            self._send(self._memory[self._packed_from : self._packed_to])
        self._packed = []
        self._packed_from = self._packed_to = aligned(self._packed_to)

    def _send(self, data: torch.Tensor) -> None:
        self.transfers.append((self._end, len(data)))
        self._end = aligned(self._end + len(data))
        self._start_sending(data)


class Run:
    """Pieces that lie side by side in one storage, at most the alignment's gap between them."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, torch.Tensor]] = []
        self.offsets: list[tuple[int, int]] = []
        self.num_bytes = 0
        self._begin = 0

    def add(self, number: int, data: torch.Tensor) -> bool:
        """Whether flat uint8 `data` belongs to the run; the first piece always does."""
        begin = int(data.storage_offset())
        if not self.pieces:
            self._begin = begin
        elif data.untyped_storage().data_ptr() != self.pieces[0][
            1
        ].untyped_storage().data_ptr() or begin != self._begin + aligned(self.num_bytes):
            return False
        self.pieces.append((number, data))
        self.offsets.append((number, begin - self._begin))
        self.num_bytes = begin - self._begin + len(data)
        return True

    def joined(self) -> torch.Tensor:
        """uint8 [num_bytes] over all pieces and the gaps between them, where they are."""
        first = self.pieces[0][1]
        whole = torch.empty(0, dtype=torch.uint8, device=first.device)
        return whole.set_(first.untyped_storage(), self._begin, (self.num_bytes,), (1,))
