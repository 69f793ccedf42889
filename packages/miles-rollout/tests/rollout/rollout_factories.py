"""Small trajectories, groups, tasks and an engine that answers in memory, for tests of pure logic."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_contracts import (
    EngineUnavailableError,
    GenerateResult,
    Group,
    Message,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    TrajectoryIdentity,
    VersionSpan,
)


def trajectory(
    prompt_index: int = 0,
    member: int = 0,
    *,
    versions: Sequence[int | None] = (0, 0, 0),
    reward: float | None = 0.0,
    status: Status = Status.FINISHED,
    attempt: int = 0,
    error: str | None = None,
) -> Trajectory:
    """Two prompt tokens and one sampled token per entry of `versions`."""
    total = 2 + len(versions)
    logprobs = np.full(total, np.nan, dtype=np.float32)
    logprobs[2:] = -1.0
    mask = np.zeros(total, dtype=np.bool_)
    mask[2:] = True
    return Trajectory(
        identity=TrajectoryIdentity(prompt_index=prompt_index, member=member, attempt=attempt),
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(start=2 + i, end=3 + i, version=v) for i, v in enumerate(versions)),
        status=status,
        reward=reward,
        error=error,
    )


def group(
    prompt_index: int = 0,
    *,
    version: int | None = 0,
    rewards: Sequence[float | None] = (0.0, 1.0),
    status: Status = Status.FINISHED,
    length: int = 3,
    attempt: int = 0,
) -> Group:
    """One trajectory per reward, all of one version; `status` is that of the last member."""
    last = len(rewards) - 1
    return Group(
        prompt_index=prompt_index,
        size=len(rewards),
        attempt=attempt,
        trajectories=tuple(
            trajectory(
                prompt_index,
                m,
                versions=[version] * length,
                reward=r,
                status=status if m == last else Status.FINISHED,
                attempt=attempt,
            )
            for m, r in enumerate(rewards)
        ),
    )


class CountingTasks:
    """A TaskSource: the prompt is the ordinal."""

    size = 1_000_000

    def __init__(self) -> None:
        self.position = 0

    def at(self, prompt_index: int) -> Task:
        content = f"prompt {prompt_index}"
        return Task(prompt_index=prompt_index, messages=(Message(role="user", content=content),), label=prompt_index)

    def next(self) -> Task:
        self.position += 1
        return self.at(self.position - 1)

    def state(self) -> dict[str, Any]:
        return {"next": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state["next"]


class BytesRenderer:
    """A Renderer whose tokens are bytes + 1; 0 stops."""

    stop_token_ids = (0,)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        return [b + 1 for m in messages for b in (m.content or "").encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i - 1 for i in token_ids if i > 0).decode(errors="replace")


class MemoryEngine:
    """An Engine in memory: the answer is a function of the seed. It can be killed, hung and made to fail."""

    def __init__(self, url: str, *, delay: float = 0.0) -> None:
        self.url = url
        self.version: int | None = 0
        self.delay = delay
        self.dead = False
        self.failures: list[Exception] = []
        self.hung = asyncio.Event()
        self.hung.set()
        self.served: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.aborted: list[str | None] = []
        self.loaded: list[tuple[Any, int]] = []
        self.running = 0

    async def _alive(self) -> None:
        await self.hung.wait()
        if self.dead:
            raise EngineUnavailableError(self.url, "connection refused")

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        await self._alive()
        self.running += 1
        try:
            version = self.version
            await asyncio.sleep(self.delay)
            await self._alive()
            if self.failures:
                raise self.failures.pop(0)
        finally:
            self.running -= 1
        self.served.append((tuple(input_ids), params))
        random = np.random.default_rng([params.seed or 0, len(input_ids)])
        count = min(int(random.integers(1, 9)), params.max_new_tokens)
        ids = random.integers(ord("a") + 1, ord("z") + 2, count).astype(np.int32)
        return GenerateResult(
            output_ids=ids,
            logprobs=-random.random(count).astype(np.float32),
            version_spans=(VersionSpan(start=0, end=count, version=version),),
            finish_reason="stop" if count < params.max_new_tokens else "length",
            cached_tokens=0,
            request_id=request_id,
        )

    async def abort(self, request_id: str | None = None) -> None:
        self.aborted.append(request_id)

    async def healthy(self) -> bool:
        await self._alive()
        return True

    async def weight_version(self) -> int | None:
        await self._alive()
        return self.version

    async def load_from_disk(self, path: Any, version: int) -> None:
        await self._alive()
        self.loaded.append((path, version))
        self.version = version
