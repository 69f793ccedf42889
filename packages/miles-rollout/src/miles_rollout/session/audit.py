"""An audit proves that every trained token is one that the engine sampled, with its log-prob, after that prompt.

The engine's answer is fingerprinted when it arrives, before the session tree or anything else has touched it
(`record`). A trajectory carries the fingerprints of its turns in `metadata["engine_record"]`, so that it can be
audited again wherever it went: after the wire, from a run folder, at the end of a run.

How a run uses it::

    report = AuditReport()
    for trajectory in everything_that_was_trained:
        report = report + audit([trajectory])
    assert report.mismatches == 0          # report.to_metrics() -> flat floats for `miles report`

`agent_generate` audits every episode as it ends and puts the episode's counters into the metadata of its
first trajectory (`metadata["session"]`), which `audit` adds up as well.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from miles_contracts import Trajectory
from miles_rollout.token_ids import TokenIds


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprint of one engine answer.

    Attributes:
        request_id: the request.
        prompt_tokens: length of the prompt it was given.
        prompt_crc: CRC-32 of the prompt's int32 little-endian ids.
        tokens: how many were sampled.
        digest: BLAKE2b-128, in hex, of the sampled ids (int32) followed by their log-probs (float32).
    """

    request_id: str
    prompt_tokens: int
    prompt_crc: int
    tokens: int
    digest: str


class SessionCounters(msgspec.Struct, kw_only=True):
    """What happened in a session (or in many, added up).

    Attributes:
        turns: generations committed.
        sampled_tokens: tokens of those.
        trajectories: leaves that became trajectories.
        branches: trajectories beyond a session's first.
        abandoned_turns: committed generations that the client retried; never trained.
        abandoned_tokens: tokens of those.
        discarded_turns: engine answers that were not committed (aborted, or nonsense); the client got an error.
        discarded_tokens: tokens of those, as far as known.
        truncated_turns: generations cut by a length limit.
        malformed_calls: tool calls that could not be parsed and were delivered as content.
        demoted_messages: assistant messages in prompts that the policy did not sample there (edited or injected).
        sampling_overrides: requests whose sampling settings gave way to the session's.
        forced_calls: turns whose call was opened in the prompt, because the client forced it.
        relaxed_tool_choices: requests whose forced tool choice was served as "auto".
        repairs: kind of repair -> turns that stayed trainable thanks to it.
        ignored_fields: name -> requests with a field of that name, which nothing is known about.
    """

    turns: int = 0
    sampled_tokens: int = 0
    trajectories: int = 0
    branches: int = 0
    abandoned_turns: int = 0
    abandoned_tokens: int = 0
    discarded_turns: int = 0
    discarded_tokens: int = 0
    truncated_turns: int = 0
    malformed_calls: int = 0
    demoted_messages: int = 0
    sampling_overrides: int = 0
    forced_calls: int = 0
    relaxed_tool_choices: int = 0
    repairs: dict[str, int] = {}
    ignored_fields: dict[str, int] = {}

    def __add__(self, other: SessionCounters) -> SessionCounters:
        numbers = {f: getattr(self, f) + getattr(other, f) for f in self._numbers()}
        repairs = _added(self.repairs, other.repairs)
        return SessionCounters(
            **numbers, repairs=repairs, ignored_fields=_added(self.ignored_fields, other.ignored_fields)
        )

    def to_metrics(self) -> dict[str, float]:
        """Flat numbers; repairs become `repairs/<kind>`, ignored fields their sum (clients choose their names)."""
        flat = {f: float(getattr(self, f)) for f in self._numbers()}
        flat["ignored_fields"] = float(sum(self.ignored_fields.values()))
        return flat | {f"repairs/{kind}": float(count) for kind, count in self.repairs.items()}

    @classmethod
    def _numbers(cls) -> list[str]:
        return [f for f in cls.__struct_fields__ if f not in ("repairs", "ignored_fields")]


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted(one.keys() | other.keys())}


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found; reports of parts add up to the report of the whole.

    Attributes:
        tokens_audited: trained tokens that were compared with the engine's record.
        mismatches: trained tokens that differ from it, or that it does not know, or that were trained before.
        trajectories: trajectories looked at.
        turns: turns compared.
        first_mismatch: what the first one was, "" for none.
        sessions: counters of the sessions that the trajectories came from.
    """

    tokens_audited: int = 0
    mismatches: int = 0
    trajectories: int = 0
    turns: int = 0
    first_mismatch: str = ""
    sessions: SessionCounters = msgspec.field(default_factory=SessionCounters)

    def __add__(self, other: AuditReport) -> AuditReport:
        return AuditReport(
            tokens_audited=self.tokens_audited + other.tokens_audited,
            mismatches=self.mismatches + other.mismatches,
            trajectories=self.trajectories + other.trajectories,
            turns=self.turns + other.turns,
            first_mismatch=self.first_mismatch or other.first_mismatch,
            sessions=self.sessions + other.sessions,
        )

    def to_metrics(self) -> dict[str, float]:
        """Flat numbers: `tokens_audited`, `mismatches`, ... and the session counters under `session/`."""
        own = {f: float(getattr(self, f)) for f in ("tokens_audited", "mismatches", "trajectories", "turns")}
        return own | {f"session/{name}": value for name, value in self.sessions.to_metrics().items()}


def record(
    request_id: str, prompt: TokenIds, output_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> SampleRecord:
    """Fingerprint an engine's answer; call it before anything else uses the answer.

    Args:
        request_id: the request.
        prompt: what the engine was given.
        output_ids: int32 [N], what it sampled.
        logprobs: float32 [N], of those.
    """
    return SampleRecord(
        request_id=request_id,
        prompt_tokens=len(prompt),
        prompt_crc=prompt.crc,
        tokens=int(output_ids.shape[0]),
        digest=_digest(output_ids, logprobs),
    )


def _digest(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> str:
    hasher = hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").data, digest_size=16)
    hasher.update(np.ascontiguousarray(logprobs, dtype="<f4").data)
    return hasher.hexdigest()


def records_of(trajectory: Trajectory) -> dict[str, SampleRecord]:
    """The engine's records that a trajectory carries, by request; empty when it carries none."""
    listed = trajectory.metadata.get("engine_record", [])
    return {r.request_id: r for r in msgspec.convert(listed, list[SampleRecord])}


def audit(trajectories: Sequence[Trajectory]) -> AuditReport:
    """Compare every trained token of the trajectories with the records they carry.

    Pass the trajectories of a session together (or of a whole run): a turn that two of them train is a mismatch.
    """
    total = AuditReport()
    trained: set[str] = set()
    for trajectory in trajectories:
        total = total + _audit_one(trajectory, trained)
    return total


def _audit_one(trajectory: Trajectory, trained: set[str]) -> AuditReport:
    records = records_of(trajectory)
    ids = np.ascontiguousarray(trajectory.token_ids, dtype="<i4")
    unexplained = trajectory.loss_mask.copy()
    bad, first, crc, at = 0, "", 0, 0
    for turn in trajectory.turns:
        crc, at = zlib.crc32(ids[at : turn.start].data, crc), turn.start
        mask = trajectory.loss_mask[turn.start : turn.end]
        unexplained[turn.start : turn.end] = False
        reason = _turn_mismatch(trajectory, turn.start, turn.end, records.get(turn.request_id or ""), crc)
        if not reason and mask.any():
            if turn.request_id in trained:
                reason = "was trained already"
            trained.add(turn.request_id or "")
        if reason and mask.any():
            bad += int(mask.sum())
            first = first or f"request {turn.request_id}, tokens {turn.start}..{turn.end}: {reason}"
    if unexplained.any():
        bad += int(unexplained.sum())
        first = first or f"token {int(np.flatnonzero(unexplained)[0])} is trained but belongs to no turn"
    counters: Any = trajectory.metadata.get("session")
    return AuditReport(
        tokens_audited=trajectory.num_trained,
        mismatches=bad,
        trajectories=1,
        turns=len(trajectory.turns),
        first_mismatch=first,
        sessions=msgspec.convert(counters, SessionCounters) if counters else SessionCounters(),
    )


def _turn_mismatch(trajectory: Trajectory, start: int, end: int, known: SampleRecord | None, crc: int) -> str:
    if known is None:
        return "the engine has no record of it"
    if (known.prompt_tokens, known.tokens) != (start, end - start):
        return f"the engine sampled {known.tokens} tokens after {known.prompt_tokens}, not {end - start} after {start}"
    if known.prompt_crc != crc:
        return "the prompt is not the one that the engine was given"
    if known.digest != _digest(trajectory.token_ids[start:end], trajectory.logprobs[start:end]):
        return "ids or log-probs are not those that the engine sampled"
    return ""
