"""Building blocks of trajectories: the seed of a sample, a single generation, and the record of a failure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from miles_contracts import (
    GenerateResult,
    InvalidFieldError,
    RoutingTrace,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    TrajectoryIdentity,
    Turn,
    VersionSpan,
)


def derive_seed(run_seed: int, prompt_index: int, member: int, attempt: int, turn: int = 0) -> int:
    """A sampling seed in [0, 2**31) that depends on nothing else, so that a resumed run samples the same tokens."""
    packed = struct.pack("<5q", run_seed, prompt_index, member, attempt, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 33


def status_of(result: GenerateResult, params: SamplingParams) -> Status:
    """How a generation ended, from its tokens first.

    An answer whose last token is a stop token is finished, also where the engine says `length` because that
    token was the last one allowed. Any other `length` is truncated.
    """
    if result.finish_reason == "abort":
        return Status.ABORTED
    ids = result.output_ids
    if len(ids) and not params.ignore_eos and int(ids[-1]) in params.stop_token_ids:
        return Status.FINISHED
    return Status.TRUNCATED if result.finish_reason == "length" else Status.FINISHED


def single_generation(
    *,
    identity: TrajectoryIdentity,
    prompt_ids: Sequence[int],
    result: GenerateResult,
    params: SamplingParams,
    num_experts: int | None = None,
) -> Trajectory:
    """The unscored trajectory of one prompt and what an engine sampled after it.

    Raises:
        InvalidFieldError: the engine's answer contradicts itself (counts, spans, log-probs).
    """
    prompt, count = len(prompt_ids), len(result.output_ids)
    if len(result.logprobs) != count:
        raise InvalidFieldError("logprobs", len(result.logprobs), f"the engine sampled {count} tokens")
    covered = sum(s.end - s.start for s in result.version_spans)
    if covered != count:
        raise InvalidFieldError("version_spans", covered, f"they must cover the {count} sampled tokens")
    total = prompt + count
    token_ids = np.empty(total, dtype=np.int32)
    token_ids[:prompt] = prompt_ids
    token_ids[prompt:] = result.output_ids
    logprobs = np.full(total, np.nan, dtype=np.float32)
    # Rounding in the engine's softmax may leave a log-prob an ulp above 0.
    logprobs[prompt:] = np.minimum(np.asarray(result.logprobs, dtype=np.float32), 0.0)
    mask = np.zeros(total, dtype=np.bool_)
    mask[prompt:] = True
    routing = None
    if result.routing is not None and num_experts is not None:
        routing = RoutingTrace.of(np.asarray(result.routing), num_experts)
    return Trajectory(
        identity=identity,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=tuple(
            VersionSpan(start=prompt + s.start, end=prompt + s.end, version=s.version) for s in result.version_spans
        ),
        status=status_of(result, params),
        sampling=params.transform,
        turns=(
            Turn(
                start=prompt,
                end=total,
                finish_reason=result.finish_reason,
                request_id=result.request_id,
                cached_tokens=result.cached_tokens,
            ),
        ),
        routing=routing,
    )


def failed_trajectory(task: Task, member: int, attempt: int, reason: str) -> Trajectory:
    """The record of an episode that left nothing to train."""
    return Trajectory(
        identity=TrajectoryIdentity(prompt_index=task.prompt_index, member=member, attempt=attempt),
        token_ids=np.empty(0, dtype=np.int32),
        loss_mask=np.empty(0, dtype=np.bool_),
        logprobs=np.empty(0, dtype=np.float32),
        version_spans=(),
        status=Status.FAILED,
        error=reason,
    )
