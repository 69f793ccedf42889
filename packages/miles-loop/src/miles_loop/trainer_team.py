"""How the ranks of a trainer group find each other, and how rank 0 has the others do their part.

Rank 0 is to the others what the driver is to it: it sends a frame to each, does its own part, and reads their answers.
Every read has a deadline. Once a rank is lost, or failed where others did not, nothing that the group holds is used any
more: each later request is answered with the same error, and the driver starts the whole group again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from miles_contracts import MilesError, wire
from miles_loop import trainer_link as link
from miles_loop.tcp_link import Listener, connect
from miles_loop.trainer_server import Connection
from miles_trainer.errors import RankFailedError, RankGoneError, RankLateError, RankLostError
from miles_trainer.ranks import OneRank, Ranks, TorchRanks, meeting_point
from miles_trainer.shares import Share

R = TypeVar("R")


class Team:
    """Rank 0's end of its connections to the other ranks, in the order of ranks.

    Args:
        sockets: connected, the first to rank 1.
        timeout_s: for each answer.
    """

    def __init__(self, sockets: Sequence[socket.socket], timeout_s: float) -> None:
        self._sockets = sockets
        self._connections = [Connection(sock) for sock in sockets]
        self._timeout_s = timeout_s
        self._broken: MilesError | None = None
        for sock in sockets:
            sock.settimeout(timeout_s)

    def require_whole(self) -> None:
        """Refuse to go on with a group that has lost a rank.

        Raises:
            RankLostError, RanksDivergedError: what happened to it.
        """
        if self._broken is not None:
            raise self._broken

    def give_up(self, error: MilesError) -> MilesError:
        """The group is of no more use; returns the error, by the name of the rank that hung up if one has."""
        if self._broken is None:
            gone = self._hung_up() if isinstance(error, RankLostError) else None
            self._broken = error if gone is None else RankGoneError(f"trainer rank {gone} has ended: {error}")
        return self._broken

    def tell(self, requests: Sequence[link.Request]) -> None:
        """Send one request to each rank.

        Raises:
            RankLostError: one cannot be reached.
        """
        self.require_whole()
        for rank, (connection, request) in enumerate(zip(self._connections, requests, strict=True), start=1):
            try:
                connection.send(request)
            except OSError as error:
                raise self.give_up(_lost(rank, error, self._timeout_s)) from error

    def answers(self, kind: type[R]) -> list[R]:
        """The answer of each rank to what it was told last.

        Raises:
            RankLostError: one did not answer.
            RankFailedError: one answered with an error, although rank 0 had none.
        """
        replies = self.replies()
        answers: list[R] = [reply for reply in replies if isinstance(reply, kind)]
        if len(answers) < len(replies):
            rank, reply = next((n, r) for n, r in enumerate(replies, start=1) if not isinstance(r, kind))
            said = f"{reply.kind}: {reply.message}" if isinstance(reply, link.Failed) else type(reply).__name__
            raise self.give_up(RankFailedError(f"trainer rank {rank} answered {said}"))
        return answers

    def replies(self) -> list[link.Reply]:
        """What each rank says to what it was told last, errors too: what they mean for the group is for the caller.

        Raises:
            RankLostError: one did not answer.
        """
        return [self._reply(rank, connection) for rank, connection in enumerate(self._connections, start=1)]

    @property
    def size(self) -> int:
        """Number of the other ranks."""
        return len(self._connections)

    def _reply(self, rank: int, connection: Connection) -> link.Reply:
        try:
            frame = connection.receive_frame()
        except OSError as error:
            raise self.give_up(_lost(rank, error, self._timeout_s)) from error
        if frame is None:
            raise self.give_up(RankGoneError(f"trainer rank {rank} has ended"))
        return wire.decode(frame, link.Reply)  # type: ignore[arg-type]

    def _hung_up(self) -> int | None:
        """A rank that has closed its connection, None while all are there."""
        for rank, sock in enumerate(self._sockets, start=1):
            sock.settimeout(0)
            try:
                if not sock.recv(1, socket.MSG_PEEK):
                    return rank
            except BlockingIOError:
                continue
            except OSError:
                return rank
            finally:
                sock.settimeout(self._timeout_s)
        return None

    def close(self) -> None:
        """Have the others end."""
        for connection, sock in zip(self._connections, self._sockets, strict=True):
            with contextlib.suppress(OSError):
                connection.send(link.Stop())
            sock.close()


def _lost(rank: int, error: OSError, timeout_s: float) -> RankLostError:
    if isinstance(error, TimeoutError):
        return RankLateError(f"trainer rank {rank} gave no answer within {timeout_s:g} s")
    return RankGoneError(f"trainer rank {rank} has ended: {error}")


class Gathering:
    """Rank 0 before the others have come. Everything listens on ports that are bound here, so none can be taken.

    Args:
        request: of the driver.
    """

    def __init__(self, request: link.OpenGroup) -> None:
        self._size, self._host, self._timeout_s = request.size, request.host, request.timeout_s
        self.others = request.size - 1
        self._meeting = meeting_point(request.host, timeout_s=request.timeout_s)
        self._listeners = [Listener(request.host) for _ in range(self.others)]
        # The others come while this process still waits for the driver's next word, and prove themselves at once.
        thread = ThreadPoolExecutor(1, thread_name_prefix="trainer-ranks")
        self._sockets = thread.submit(asyncio.run, self._accepted())
        thread.shutdown(wait=False)

    def opened(self) -> link.GroupOpened:
        """What the driver passes on."""
        return link.GroupOpened(
            meeting_port=self._meeting.port,
            addresses=tuple(listener.address for listener in self._listeners),
            secrets=tuple(listener.secret for listener in self._listeners),
        )

    def team(self) -> Team:
        """The connections, once all ranks have come.

        Raises:
            RankLateError: one has not.
        """
        sockets = self._sockets.result()
        for sock in sockets:
            sock.setblocking(True)
        return Team(sockets, self._timeout_s)

    async def _accepted(self) -> list[socket.socket]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return list(await asyncio.gather(*(listener.accept() for listener in self._listeners)))
        except TimeoutError:
            raise RankLateError(f"not all of {self._size} trainer ranks came within {self._timeout_s:g} s") from None

    def ranks(self) -> Ranks:
        """The group that sums gradients."""
        return TorchRanks(self._meeting, 0, self._size, timeout_s=self._timeout_s, host=self._host)


class Joined:
    """Another rank than the first, which has connected to that one.

    Args:
        request: of the driver.

    Raises:
        RunError: rank 0 is not there.
    """

    def __init__(self, request: link.JoinGroup) -> None:
        self._request = request
        self.first: socket.socket = connect(request.address, request.secret)
        self._own_address = str(self.first.getsockname()[0])
        # Nothing here has to be put away, and a wait inside a collective is not woken by a handler.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ranks(self) -> Ranks:
        """The group that sums gradients."""
        request = self._request
        meeting = meeting_point(request.host, request.meeting_port, timeout_s=request.timeout_s)
        return TorchRanks(meeting, request.rank, request.size, timeout_s=request.timeout_s, host=self._own_address)


class TrainerMembership:
    """What this process is in its trainer group: the only rank unless the driver says otherwise."""

    def __init__(self) -> None:
        self._gathering: Gathering | None = None
        self._joined: Joined | None = None

    def before(self, request: link.Request) -> link.Reply:
        """Open or join a group."""
        match request:
            case link.OpenGroup():
                self._gathering = Gathering(request)
                return self._gathering.opened()
            case link.JoinGroup():
                self._joined = Joined(request)
                return link.Done()
        raise MilesError(f"{type(request).__name__} before start")

    def next_driver(self) -> socket.socket | None:
        """Rank 0, for the others."""
        return self._joined.first if self._joined is not None else None

    def meet(self, start: link.Start) -> tuple[Ranks, Team | None]:
        """The group, with its other ranks started too where this is rank 0.

        Raises:
            RankLostError: one is missing.
        """
        if self._joined is not None:
            return self._joined.ranks(), None
        if self._gathering is None:
            return OneRank(), None
        team = self._gathering.team()
        team.tell([start] * self._gathering.others)
        return self._gathering.ranks(), team


def share_request(share: Share) -> link.TrainShare:
    """A share as a message."""
    return link.TrainShare(
        trajectories=list(share.trajectories),
        advantages=share.advantages,
        weights=share.weights,
        num_trained=share.num_trained,
        num_members=share.num_members,
    )
