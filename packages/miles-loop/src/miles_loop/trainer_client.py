"""The driver's end of the trainer process; also the source of weight updates.

One request is outstanding at a time. Every wait has a deadline with a name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from miles_contracts import (
    DeadlineExceededError,
    Group,
    MilesError,
    WeightManifest,
    WeightUpdateError,
    wire,
)
from miles_loop import trainer_link as link
from miles_loop.errors import DiskFullError, RunError, TrainerFailedError
from miles_loop.files import is_disk_full
from miles_sync.messages import AnyBucket, GroupOffer
from miles_sync.sglang_layout import ChecksumTable, SglangForm

R = TypeVar("R")
_REASONS = {
    "NonFiniteError": "non_finite",
    "CheckpointError": "damaged_checkpoint",
    "InvalidFieldError": "invalid_field",
    "RankGoneError": "rank_gone",
    "RankLateError": "rank_late",
    "RanksDivergedError": "ranks_diverged",
}
"""Reasons of a run's end by the class of the trainer's error."""
LOST_GROUP = ("rank_gone", "rank_late", "ranks_diverged")
"""Those after which the trainer group has to be started again: its weights, or some of its ranks, are lost."""


class Incoming(Protocol):
    """A connection that the trainer process has yet to open."""

    async def accept(self) -> socket.socket:
        """Wait for it."""

    def close(self) -> None:
        """Do not wait any longer."""


class TrainerClient:
    """Typed calls over one stream socket. `deadline_s` bounds each of them.

    Raises (every call):
        DeadlineExceededError: no answer in time.
        TrainerFailedError: the trainer answered with an error; its reason is the error's kind.
        RunError: the connection broke (`trainer_gone`).
    """

    def __init__(self, connection: socket.socket | Incoming, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.gone = False
        """Whether the connection broke, or that to another rank: whatever fails from then on, the end of a trainer
        process is behind it."""

    async def start(self, request: link.Start, deadline_s: float) -> int:
        """Load the model; returns its version."""
        if self._writer is None:
            await self._open("the trainer process to connect", deadline_s)
        return (await self._call(request, link.Started, "the trainer to load its model", deadline_s)).version

    async def _open(self, waited_for: str, deadline_s: float) -> None:
        sock = self._connection
        if not isinstance(sock, socket.socket):
            try:
                async with asyncio.timeout(deadline_s):
                    sock = await sock.accept()
            except TimeoutError:
                raise DeadlineExceededError(waited_for, deadline_s, "raise engine.start_timeout_s") from None
        self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=2**20)

    async def open_group(self, size: int, host: str, timeout_s: float, deadline_s: float) -> link.GroupOpened:
        """Have rank 0 be ready for the others of a trainer group; before `start`."""
        await self._open("the trainer process to connect", deadline_s)
        request = link.OpenGroup(size=size, host=host, timeout_s=timeout_s)
        return await self._call(request, link.GroupOpened, "the trainer's rank 0 to listen", deadline_s)

    async def join_group(self, request: link.JoinGroup, deadline_s: float) -> None:
        """Have another rank connect to rank 0, which is all that the driver says to it."""
        await self._open(f"trainer rank {request.rank} to connect", deadline_s)
        await self._call(request, link.Done, f"trainer rank {request.rank} to join its group", deadline_s)
        await self.stop()

    async def train_step(self, groups: Sequence[Group]) -> link.StepDone:
        """One optimiser step."""
        return await self._call(link.TrainStep(groups=list(groups)), link.StepDone, "the optimiser step")

    async def connect(self, receivers: Sequence[str], *, split: bool, digests: bool = True) -> GroupOffer | None:
        """Name the engines that receive from now on; the group that they have to join, if any."""
        request = link.Connect(receivers=tuple(receivers), split=split, digests=digests)
        return (await self._call(request, link.Connected, "the sender to turn to other engines")).offer

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        """Open an export of the current weights: its name, and names, dtypes and shapes of what comes."""
        begun = await self._call(link.BeginExport(version=version), link.ExportBegun, "the weight export")
        return begun.update_id, begun.manifest

    async def buckets(self, update_id: str) -> AsyncIterator[AnyBucket]:
        """The buckets of an open export, in order; each is filled when it is asked for."""
        while True:
            ready = await self._call(link.NextBucket(update_id=update_id), link.BucketReady, "a bucket of weights")
            if ready.bucket is None:
                return
            yield ready.bucket

    async def expect_checksums(self, update_id: str, form: SglangForm) -> None:
        """Engines of this form will be verified; before the first bucket."""
        await self._call(
            link.ExpectChecksums(update_id=update_id, form=form), link.Done, "the trainer to expect checksums"
        )

    async def checksums(self, update_id: str, form: SglangForm) -> ChecksumTable:
        """What the checksums of engines of this form have to be; after the last bucket."""
        request = link.GetChecksums(update_id=update_id, form=form)
        return (await self._call(request, link.Checksums, "the checksums of what was sent")).table

    async def acknowledge(self, update_id: str, index: int) -> None:
        """Every engine has this bucket."""
        await self._call(link.Acknowledge(update_id=update_id, index=index), link.Done, "an acknowledgement")

    async def release(self, update_id: str) -> None:
        """The buckets are no longer needed."""
        await self._call(link.ReleaseExport(update_id=update_id), link.Done, "the release of buckets")

    async def save(self, directory: Path) -> None:
        """Write model, optimiser, schedule and random state into an existing directory.

        Raises:
            DiskFullError: no room.
        """
        await self._write(link.Save(directory=_absolute(directory)), directory, "the trainer to save")

    async def _write(self, request: link.Request, directory: Path, waited_for: str) -> None:
        try:
            await self._call(request, link.Done, waited_for)
        except TrainerFailedError as error:
            if is_disk_full(str(error)):
                raise DiskFullError(directory) from error
            raise

    async def export_model(self, directory: Path) -> None:
        """Write model and tokenizer as a Hugging Face folder.

        Raises:
            DiskFullError: no room.
        """
        await self._write(
            link.ExportModel(directory=_absolute(directory)), directory, "the trainer to export its model"
        )

    async def stop(self) -> None:
        """Ask the process to end and close the connection."""
        if self._writer is None:
            self._connection.close()
            return
        try:
            self._writer.write(wire.encode(link.Stop()))
            await self._writer.drain()
        except ConnectionError:
            pass
        self._writer.close()
        self._writer = None

    async def _call(self, request: link.Request, kind: type[R], waited_for: str, deadline_s: float | None = None) -> R:
        seconds = deadline_s or self._deadline_s
        # A cancelled caller must not leave half a conversation behind: the exchange goes on and its answer is dropped.
        reply = await asyncio.shield(asyncio.create_task(self._exchange(request, waited_for, seconds)))
        if isinstance(reply, link.Failed):
            # The end of a rank's process is known soon: it is the better reason.
            self.gone = self.gone or reply.kind == "RankGoneError"
            raise _error_of(reply)
        if not isinstance(reply, kind):
            raise RunError("protocol", f"the trainer process answered {type(reply).__name__}, not {kind.__name__}")
        return reply

    async def _exchange(self, request: link.Request, waited_for: str, seconds: float) -> link.Reply:
        async with self._lock:
            try:
                async with asyncio.timeout(seconds):
                    return await self._send_and_receive(request)
            except TimeoutError:
                raise DeadlineExceededError(waited_for, seconds, "raise runtime.step_timeout_s") from None
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.gone = True
                raise RunError("trainer_gone", "the trainer process closed its connection") from error

    async def _send_and_receive(self, request: link.Request) -> link.Reply:
        assert self._reader is not None
        assert self._writer is not None
        # checksums and packed routes of a large batch take tens of milliseconds
        self._writer.writelines(await asyncio.to_thread(wire.encode_parts, request))
        await self._writer.drain()
        header = await self._reader.readexactly(wire.HEADER_BYTES)
        rest = await self._reader.readexactly(wire.frame_length(header) - wire.HEADER_BYTES)
        return wire.decode(header + rest, link.Reply)  # type: ignore[arg-type]


def _absolute(directory: Path) -> str:
    """The trainer process may run in another folder."""
    return str(directory.resolve())


def _error_of(reply: link.Failed) -> MilesError:
    if reply.kind == "WeightUpdateError":
        return WeightUpdateError(reply.message, tensor=reply.tensor)
    reason = _REASONS.get(reply.kind, "trainer_failed")
    return TrainerFailedError(reason, f"trainer: {reply.message}", resumable=reason != "invalid_field")
