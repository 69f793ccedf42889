"""Weights that all ranks of a trainer group send together: the others do what rank 0 does, at the same time.

    driver                rank 0                         rank k
       ---- NextBucket ------>    ---- NextBucket ---------->
                            (each writes its part into the engines)
       <--- BucketReady ------    <--- BucketReady ----------     of all: what each wrote, confirmed by another

An engine that fails costs the update, not the group: the ranks hold what they held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miles_contracts import WeightUpdateError
from miles_loop import trainer_link as link
from miles_loop.senders import JointSender
from miles_loop.trainer_team import Team
from miles_sync.peer import SourcesDifferError
from miles_trainer.errors import RankFailedError, RanksDivergedError


def send_together(team: Team, request: link.Request, own: Callable[[], link.Reply], sender: JointSender) -> link.Reply:
    """Answer a request of the driver with what all ranks have done.

    Args:
        team: the other ranks.
        request: about weights.
        own: does rank 0's part.
        sender: rank 0's.

    Raises:
        WeightUpdateError: a rank could not do its part of the update; the group is whole.
        RankLostError, RankFailedError, RanksDivergedError: the group is of no more use.
    """
    team.tell([request] * team.size)
    try:
        reply = own()
    except Exception:  # raised on; what the others answer must not be taken for answers to the next request
        team.replies()
        raise
    replies = team.replies()
    for rank, other in enumerate(replies, start=1):
        if isinstance(other, link.Failed):
            raise _error_of(rank, other, team)
    if isinstance(reply, link.BucketReady):
        return _merged([reply, *replies], sender, team)
    return reply


def _merged(replies: Sequence[link.Reply], sender: JointSender, team: Team) -> link.BucketReady:
    parts = [reply.bucket for reply in replies if isinstance(reply, link.BucketReady) and reply.bucket is not None]
    if not parts:
        return link.BucketReady(bucket=None)
    if len(parts) < len(replies):
        raise team.give_up(RankFailedError(f"only {len(parts)} of {len(replies)} trainer ranks sent a bucket"))
    try:
        return link.BucketReady(bucket=sender.merge(parts))
    except SourcesDifferError as error:
        writer, other = error.ranks
        what = f"trainer ranks {writer} and {other} hold different bytes of {error.tensor}"
        raise team.give_up(RanksDivergedError(f"{what}; nothing of it serves")) from error


def _error_of(rank: int, failed: link.Failed, team: Team) -> Exception:
    if failed.kind == WeightUpdateError.__name__:
        return WeightUpdateError(f"trainer rank {rank}: {failed.message}", tensor=failed.tensor)
    return team.give_up(RankFailedError(f"trainer rank {rank} answered {failed.kind}: {failed.message}"))
