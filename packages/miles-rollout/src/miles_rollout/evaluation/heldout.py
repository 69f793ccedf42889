"""Held-out tasks are sampled and scored like training tasks, and never trained."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import msgspec

from miles_contracts import Generate, InvalidFieldError, Status, Task, Trajectory
from miles_rollout.episodes import EpisodeRunner, GroupReward, WorkerConfig
from miles_rollout.evaluation.estimators import mean_at_k, pass_at_k
from miles_rollout.ledger import Issue
from miles_rollout.metrics import mean
from miles_rollout.tasks import TaskSource

_log = logging.getLogger(__name__)


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out task family.

    Attributes:
        name: in the metrics, `eval/<name>/...`.
        source: its first `prompts` tasks are used, the same ones each time.
        generate: how they are answered (own sampling parameters and seed).
        prompts: how many tasks, None for all of the source.
        samples: answers per task.
        ks: the k of pass@k and mean@k; each at most `samples`.
        solved_at: least reward that counts as solved for pass@k.
        group_reward: scores all answers to a prompt together, None where `generate` scores them.
    """

    name: str
    source: TaskSource
    generate: Generate
    prompts: int | None = None
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    solved_at: float = 1.0
    group_reward: GroupReward | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise InvalidFieldError("name", self.name, "use a name without '/', it becomes eval/<name>/reward")
        if self.samples < 1:
            raise InvalidFieldError("samples", self.samples, "sample each task at least once")
        if self.prompts is not None and not 1 <= self.prompts <= self.source.size:
            raise InvalidFieldError("prompts", self.prompts, f"the source has {self.source.size} tasks")
        if bad := [k for k in self.ks if not 1 <= k <= self.samples]:
            raise InvalidFieldError("ks", bad[0], f"k is in [1, samples], samples is {self.samples}")


async def evaluate(
    tasks: Sequence[HeldOut],
    *,
    concurrency: int = 256,
    episode_timeout_s: float | None = None,
) -> dict[str, float]:
    """Sample and score all held-out tasks.

    Args:
        tasks: families, evaluated side by side.
        concurrency: bound of trajectories in flight over all families.
        episode_timeout_s: seconds for one answer.

    Returns:
        For each family `eval/<name>/`: `reward` (over scored answers), `pass@k`, `mean@k`, `truncated_ratio`,
        `failed_ratio`, `response_length_mean`, and which weight versions sampled (`weight_version/mean`,
        `weight_version/mixed_version_ratio`, left out when an engine does not say).
    """
    if len({t.name for t in tasks}) != len(tasks):
        raise InvalidFieldError("tasks", [t.name for t in tasks], "names are unique")
    slots = asyncio.Semaphore(concurrency)
    results = await asyncio.gather(*(_evaluate_one(t, slots, episode_timeout_s) for t in tasks))
    return {name: value for one in results for name, value in one.items()}


async def _evaluate_one(held_out: HeldOut, slots: asyncio.Semaphore, timeout_s: float | None) -> dict[str, float]:
    runner = EpisodeRunner(
        generate=_bounded(held_out.generate, slots, timeout_s),
        group_reward=held_out.group_reward,
        config=WorkerConfig(),
        group_size=held_out.samples,
    )
    count = held_out.prompts if held_out.prompts is not None else held_out.source.size
    groups = await asyncio.gather(
        *(runner.run(held_out.source.at(i), Issue(prompt_index=i), member_done=lambda: None) for i in range(count))
    )
    return _figures(held_out, [list(g.trajectories) for g in groups])


def _bounded(generate: Generate, slots: asyncio.Semaphore, timeout_s: float | None) -> Generate:
    """`generate` in one of `slots`; the wait for a slot does not count against the time limit."""

    async def run(task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        async with slots, asyncio.timeout(timeout_s):
            return await generate(task, member, attempt)

    return run


def _figures(held_out: HeldOut, groups: list[list[Trajectory]]) -> dict[str, float]:
    trajectories = [t for g in groups for t in g]
    failed = [t for t in trajectories if t.reward is None or t.status in (Status.FAILED, Status.ABORTED)]
    rewards = [
        [t.reward for t in g if t.reward is not None and t.status not in (Status.FAILED, Status.ABORTED)]
        for g in groups
    ]
    total = len(trajectories)
    if failed:
        _log.warning(
            "%s: %d of %d answers failed; one: %s", held_out.name, len(failed), len(trajectories), failed[0].error
        )
    total = len(trajectories)
    out: dict[str, float] = {
        "prompts": len(groups),
        "failed_ratio": len(failed) / total,
        "truncated_ratio": sum(t.status is Status.TRUNCATED for t in trajectories) / total,
        "response_length_mean": mean([t.num_sampled for t in trajectories]),
    }
    if scored := [r for one in rewards for r in one]:
        out["reward"] = mean(scored)
    for k in held_out.ks:
        enough = [r for r in rewards if len(r) >= k]
        if enough:
            solved = [sum(x >= held_out.solved_at for x in r) for r in enough]
            out[f"pass@{k}"] = mean([pass_at_k(len(r), c, k) for r, c in zip(enough, solved, strict=True)])
            out[f"mean@{k}"] = mean([mean_at_k(r, k) for r in enough])
    oldest = [t.oldest_version for t in trajectories if t.version_spans]
    known = [v for v in oldest if v is not None]
    if known and len(known) == len(oldest):
        out["weight_version/mean"] = mean(known)
        mixed = sum(t.oldest_version != t.newest_version for t in trajectories if t.version_spans)
        out["weight_version/mixed_version_ratio"] = mixed / len(known)
    assert all(math.isfinite(v) for v in out.values())
    return {f"eval/{held_out.name}/{name}": float(value) for name, value in out.items()}
