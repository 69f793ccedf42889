"""Groups as a rollout would make them, and the engines' answers behind them."""

from __future__ import annotations

import numpy as np

from miles_contracts import GenerateResult, Group, Status, Trajectory, TrajectoryIdentity, Turn, VersionSpan


def answer(request_id: str, count: int, version: int = 0) -> GenerateResult:
    """What an engine says: ids and log-probs that depend on the request's id."""
    random = np.random.default_rng(abs(hash(request_id)) % 2**32)
    spans = (VersionSpan(start=0, end=count, version=version),) if count else ()
    return GenerateResult(
        output_ids=random.integers(0, 99, count).astype(np.int32),
        logprobs=-random.random(count).astype(np.float32),
        version_spans=spans,
        finish_reason="stop",
        request_id=request_id,
    )


def trajectory(
    result: GenerateResult, *, prompt: int = 3, index: int = 0, member: int = 0, reward: float | None = 0.5
) -> Trajectory:
    """The trajectory of one answer."""
    count = len(result.output_ids)
    total = prompt + count
    logprobs = np.full(total, np.nan, np.float32)
    logprobs[prompt:] = result.logprobs
    mask = np.zeros(total, np.bool_)
    mask[prompt:] = True
    spans = tuple(
        VersionSpan(start=prompt + s.start, end=prompt + s.end, version=s.version) for s in result.version_spans
    )
    return Trajectory(
        identity=TrajectoryIdentity(prompt_index=index, member=member),
        token_ids=np.concatenate([np.arange(prompt, dtype=np.int32), result.output_ids]),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=spans,
        status=Status.FINISHED,
        turns=(Turn(start=prompt, end=total, finish_reason="stop", request_id=result.request_id),),
        reward=reward,
    )


def group(index: int, counts: tuple[int, ...], version: int = 0) -> tuple[Group, list[GenerateResult]]:
    """A group with one answer of each length."""
    answers = [answer(f"p{index}-m{member}", count, version) for member, count in enumerate(counts)]
    members = tuple(trajectory(a, index=index, member=m, reward=float(m)) for m, a in enumerate(answers))
    return Group(prompt_index=index, size=len(counts), trajectories=members), answers
