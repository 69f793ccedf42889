"""Proves that the trainer trains on what the engines sampled, token by token, and on the experts they chose.

Every answer of an engine is recorded at the moment it arrives: ids and log-probs under the request's id, and a digest
of every row of expert choices. When a group is trained, each trained token is compared with its record, id and
log-prob exactly, and the digest that the trainer process computed of what it was given is compared with the driver's.
A trained token without a record is a mismatch. Each routing row that the trainer process was given is compared with
the row of the answer that fed its token first; a row that no answer of its own turn holds is a mismatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import (
    Engine,
    GenerateResult,
    Group,
    InvalidFieldError,
    SamplingParams,
    Trajectory,
    row_digests,
)
from miles_contracts.engine_proxy import EngineProxy
from miles_loop.trainer_link import turn_digest

_OFF_LOOP_ROWS = 512
"""Digests of more rows than these (about half a millisecond) are computed in a thread."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch's comparison found.

    Attributes:
        tokens_trained: tokens that entered the loss.
        mismatches: those that differ from the engine's record, have none, or changed on the way to the trainer.
        example: the first mismatch in words, "" when there is none.
        routes_audited: routing rows (one a fed token) that the trainer was given.
        route_mismatches: those that differ from the engine's record, or have none.
        route_example: the first of them in words.
    """

    tokens_trained: int
    mismatches: int
    example: str = ""
    routes_audited: int = 0
    route_mismatches: int = 0
    route_example: str = ""


class _Record(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """One answer: ids int32 [N], log-probs float32 [N], oldest weight version, and its routes.

    `rows` holds the digests of routing rows, uint64 [R], the first of which belongs to token `first_row`; None when
    the answer has no routes.
    """

    ids: Any
    logprobs: Any
    version: int | None
    first_row: int = 0
    rows: Any = None


class EngineRecords:
    """What the engines said, by request id.

    `tokens_sampled` counts every token that was recorded since the start.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self.tokens_sampled = 0
        self._capture_s = 0.0

    def take_capture_s(self) -> float:
        """Seconds that engines and this process spent on recording routes since the last call."""
        spent, self._capture_s = self._capture_s, 0.0
        return spent

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        arrays = [a for r in self._records.values() for a in (r.ids, r.logprobs, r.rows) if a is not None]
        return sum(a.nbytes for a in arrays)

    def add(
        self,
        request_id: str,
        result: GenerateResult,
        *,
        first_row: int = 0,
        rows: Any = None,
        seconds: float = 0.0,
    ) -> None:
        """Record one answer; copies, so that nothing done to the answer later reaches the record.

        Args:
            first_row: token that the first routing row belongs to.
            rows: `row_digests` of the answer's routes, None when it has none.
            seconds: what computing them took here.
        """
        ids = np.array(result.output_ids, dtype=np.int32)
        # A log-prob an ulp above 0 is rounding; trajectories hold 0 there by contract.
        logprobs = np.minimum(np.array(result.logprobs, dtype=np.float32), 0.0)
        versions = [span.version for span in result.version_spans]
        known = [version for version in versions if version is not None]
        oldest = min(known) if known and len(known) == len(versions) else None
        self._records[request_id] = _Record(ids, logprobs, oldest, first_row, rows)
        self.tokens_sampled += len(ids)
        self._capture_s += result.routing_s + seconds

    def prune(self, oldest_usable: int) -> None:
        """Drop what can never be trained: answers sampled under weights older than `oldest_usable`."""
        self._records = {
            key: record
            for key, record in self._records.items()
            if record.version is None or record.version >= oldest_usable
        }

    def _forget(self, group: Group) -> None:
        for request_id in _request_ids(group):
            self._records.pop(request_id, None)

    def state(self, groups: Iterable[Group]) -> dict[str, list[Any]]:
        """The records of these groups, for a checkpoint."""
        wanted = [request_id for group in groups for request_id in _request_ids(group)]
        found = {key: self._records[key] for key in wanted if key in self._records}
        return _state_of(found)

    def restore(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Take back what `state` gave."""
        self._records = _records_of(state)

    def take(self) -> dict[str, list[Any]]:
        """Give all records away, in the form of `state`: whoever audits has them from now on."""
        taken, self._records = self._records, {}
        return _state_of(taken)

    def absorb(self, taken: Mapping[str, Sequence[Any]], capture_s: float) -> None:
        """Add what another process recorded; copies, so that nothing of its message stays alive.

        Args:
            taken: what `take` gave there.
            capture_s: what recording routes took there, in seconds.
        """
        records = _records_of(taken)
        self._records |= records
        self.tokens_sampled += sum(len(record.ids) for record in records.values())
        self._capture_s += capture_s

    def audit(
        self,
        groups: Sequence[Group],
        trainer_digests: Sequence[Sequence[str]],
        trainer_routes: Sequence[NDArray[Any] | None] | None = None,
    ) -> AuditReport:
        """Compare a trained batch with the records, then drop them.

        Args:
            groups: what was sent to the trainer.
            trainer_digests: what the trainer answered: one digest a turn, trajectories in the same order.
            trainer_routes: the same for routing rows, None for a trajectory without; None when nothing is replayed.

        Raises:
            InvalidFieldError: the trainer answered for another number of trajectories or turns.
        """
        trajectories = [t for group in groups for t in group]
        if len(trainer_digests) != len(trajectories):
            raise InvalidFieldError("trainer digests", len(trainer_digests), f"one of each of {len(trajectories)}")
        routes = [None] * len(trajectories) if trainer_routes is None else list(trainer_routes)
        if len(routes) != len(trajectories):
            raise InvalidFieldError("trainer routes", len(routes), f"one of each of {len(trajectories)} trajectories")
        trained = mismatches = audited = wrong_routes = 0
        example = route_example = ""
        for trajectory, digests, rows in zip(trajectories, trainer_digests, routes, strict=True):
            good, reason = self._agreement(trajectory, digests)
            bad = trajectory.loss_mask & ~good
            trained += trajectory.num_trained
            mismatches += int(bad.sum())
            if not example and bad.any():
                where = int(np.flatnonzero(bad)[0])
                example = f"prompt {trajectory.identity.prompt_index}, token {where}: {reason or 'outside every turn'}"
            if rows is None and trajectory.routing is None:
                continue
            wrong = ~self._same_routes(trajectory, rows)
            audited += len(wrong)
            wrong_routes += int(wrong.sum())
            if not route_example and wrong.any():
                where = int(np.flatnonzero(wrong)[0])
                route_example = f"prompt {trajectory.identity.prompt_index}, routes of token {where}"
        for group in groups:
            self._forget(group)
        return AuditReport(
            tokens_trained=trained,
            mismatches=mismatches,
            example=example,
            routes_audited=audited,
            route_mismatches=wrong_routes,
            route_example=route_example,
        )

    def _same_routes(self, trajectory: Trajectory, rows: NDArray[Any] | None) -> NDArray[np.bool_]:
        """bool [fed tokens]: true where the trainer's row is the row of the answer that fed the token first.

        A turn feeds the tokens from the last one that the turn before it sampled to its own last but one.
        """
        same = np.zeros(max(trajectory.num_tokens - 1, 0), dtype=np.bool_)
        if rows is None or len(rows) < len(same):
            return same
        done = 0
        for turn in trajectory.turns:
            end = turn.end - 1
            record = self._records.get(turn.request_id or "")
            if record is not None and record.rows is not None and record.first_row <= done < end:
                said = record.rows[done - record.first_row : end - record.first_row]
                same[done : done + len(said)] = rows[done : done + len(said)] == said
            done = max(done, end)
        return same

    def _agreement(self, trajectory: Trajectory, digests: Sequence[str]) -> tuple[Any, str]:
        """bool [T]: true where a token equals its record on both ends; and the first reason where not."""
        if len(digests) != len(trajectory.turns):
            raise InvalidFieldError("trainer digests", len(digests), f"one of each of {len(trajectory.turns)} turns")
        good = np.zeros(trajectory.num_tokens, dtype=np.bool_)
        reason = ""
        for turn, trainer_digest in zip(trajectory.turns, digests, strict=True):
            record = self._records.get(turn.request_id or "")
            if record is None:
                reason = reason or f"no engine record of request {turn.request_id!r}"
            elif trainer_digest != turn_digest(trajectory, turn.start, turn.end):
                reason = reason or f"request {turn.request_id!r} reached the trainer changed"
            else:
                # A turn may keep only the head of an answer, never more than it.
                count = min(turn.end - turn.start, len(record.ids))
                span = slice(turn.start, turn.start + count)
                same = trajectory.token_ids[span] == record.ids[:count]
                same &= trajectory.logprobs[span] == record.logprobs[:count]
                good[span] = same
                if not same.all():
                    reason = reason or f"differs from the engine's answer to request {turn.request_id!r}"
        return good, reason


def _state_of(records: Mapping[str, _Record]) -> dict[str, list[Any]]:
    return {key: [r.ids, r.logprobs, r.version, r.first_row, r.rows] for key, r in records.items()}


def _records_of(state: Mapping[str, Sequence[Any]]) -> dict[str, _Record]:
    return {
        key: _Record(
            np.array(ids, dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            version,
            *_rows_of(*more),
        )
        for key, (ids, logprobs, version, *more) in state.items()
    }


def _request_ids(group: Group) -> list[str]:
    return [turn.request_id for t in group for turn in t.turns if turn.request_id is not None]


class RecordingEngine(EngineProxy):
    """An engine whose answers are recorded before anybody else sees them."""

    def __init__(self, engine: Engine, records: EngineRecords) -> None:
        super().__init__(engine)
        self._records = records

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        """Sample, and record the answer under its request id."""
        result = await super().generate(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )
        key = result.request_id or request_id
        if key is not None:
            began = time.perf_counter()
            rows = None if result.routing is None else await _digests(result.routing)
            spent = 0.0 if rows is None else time.perf_counter() - began
            self._records.add(key, result, first_row=routing_start, rows=rows, seconds=spent)
        return result


async def _digests(routing: NDArray[Any]) -> NDArray[Any]:
    """`row_digests`, beside the event loop when they are many."""
    return await asyncio.to_thread(row_digests, routing) if len(routing) > _OFF_LOOP_ROWS else row_digests(routing)


def _rows_of(first_row: int = 0, rows: Any = None) -> tuple[int, NDArray[np.uint64] | None]:
    """First row and digests of a record; one from before routes were audited has neither."""
    return first_row, None if rows is None else np.array(rows, dtype=np.uint64)
