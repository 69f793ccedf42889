"""Proves that the trainer trains on what the engines sampled, token by token.

Every answer of an engine is recorded at the moment it arrives: ids and log-probs under the request's id. When a
group is trained, each trained token is compared with its record, id and log-prob exactly, and the digest that the
trainer process computed of what it was given is compared with the driver's. A trained token without a record is a
mismatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from miles_contracts import (
    Engine,
    GenerateResult,
    Group,
    InvalidFieldError,
    SamplingParams,
    Trajectory,
)
from miles_loop.engine_proxy import EngineProxy
from miles_loop.trainer_link import turn_digest


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch's comparison found.

    Attributes:
        tokens_trained: tokens that entered the loss.
        mismatches: those that differ from the engine's record, have none, or changed on the way to the trainer.
        example: the first mismatch in words, "" when there is none.
    """

    tokens_trained: int
    mismatches: int
    example: str = ""


class EngineRecords:
    """What the engines said: request id -> (ids int32 [N], log-probs float32 [N], oldest weight version).

    `tokens_sampled` counts every token that was recorded since the start.
    """

    def __init__(self) -> None:
        self._records: dict[str, tuple[Any, Any, int | None]] = {}
        self.tokens_sampled = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return sum(ids.nbytes + logprobs.nbytes for ids, logprobs, _ in self._records.values())

    def add(self, request_id: str, result: GenerateResult) -> None:
        """Record one answer; copies, so that nothing done to the answer later reaches the record."""
        ids = np.array(result.output_ids, dtype=np.int32)
        # A log-prob an ulp above 0 is rounding; trajectories hold 0 there by contract.
        logprobs = np.minimum(np.array(result.logprobs, dtype=np.float32), 0.0)
        versions = [span.version for span in result.version_spans]
        known = [version for version in versions if version is not None]
        self._records[request_id] = (ids, logprobs, min(known) if known and len(known) == len(versions) else None)
        self.tokens_sampled += len(ids)

    def prune(self, oldest_usable: int) -> None:
        """Drop what can never be trained: answers sampled under weights older than `oldest_usable`."""
        self._records = {
            key: record for key, record in self._records.items() if record[2] is None or record[2] >= oldest_usable
        }

    def _forget(self, group: Group) -> None:
        for request_id in _request_ids(group):
            self._records.pop(request_id, None)

    def state(self, groups: Iterable[Group]) -> dict[str, list[Any]]:
        """The records of these groups, for a checkpoint."""
        wanted = [request_id for group in groups for request_id in _request_ids(group)]
        return {key: list(self._records[key]) for key in wanted if key in self._records}

    def restore(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Take back what `state` gave."""
        self._records = {
            key: (np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32), version)
            for key, (ids, logprobs, version) in state.items()
        }

    def audit(self, groups: Sequence[Group], trainer_digests: Sequence[Sequence[str]]) -> AuditReport:
        """Compare a trained batch with the records, then drop them.

        Args:
            groups: what was sent to the trainer.
            trainer_digests: what the trainer answered: one digest a turn, trajectories in the same order.

        Raises:
            InvalidFieldError: the trainer answered for another number of trajectories or turns.
        """
        trajectories = [t for group in groups for t in group]
        if len(trainer_digests) != len(trajectories):
            raise InvalidFieldError("trainer digests", len(trainer_digests), f"one of each of {len(trajectories)}")
        trained = mismatches = 0
        example = ""
        for trajectory, digests in zip(trajectories, trainer_digests, strict=True):
            good, reason = self._agreement(trajectory, digests)
            bad = trajectory.loss_mask & ~good
            trained += trajectory.num_trained
            mismatches += int(bad.sum())
            if not example and bad.any():
                where = int(np.flatnonzero(bad)[0])
                example = f"prompt {trajectory.identity.prompt_index}, token {where}: {reason or 'outside every turn'}"
        for group in groups:
            self._forget(group)
        return AuditReport(tokens_trained=trained, mismatches=mismatches, example=example)

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
                count = min(turn.end - turn.start, len(record[0]))
                span = slice(turn.start, turn.start + count)
                same = trajectory.token_ids[span] == record[0][:count]
                same &= trajectory.logprobs[span] == record[1][:count]
                good[span] = same
                if not same.all():
                    reason = reason or f"differs from the engine's answer to request {turn.request_id!r}"
        return good, reason


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
            self._records.add(key, result)
        return result
