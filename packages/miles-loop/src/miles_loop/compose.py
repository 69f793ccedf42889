"""From configuration to the rollout half's parts: tasks, filter, buffer, admission and worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from miles_contracts import (
    FilterDecision,
    Generate,
    Group,
    GroupFilter,
    InvalidFieldError,
    SamplingParams,
)
from miles_loop.config import RunConfig, SamplingConfig, TaskConfig, TaskSourceKind
from miles_loop.names import nearest
from miles_loop.scoring import Counting, label_check
from miles_rollout.buffer import GroupBuffer
from miles_rollout.episodes import GroupReward, WorkerConfig
from miles_rollout.filters import reward_variance, user_filter
from miles_rollout.ledger import Ledger, UnusedPolicy
from miles_rollout.scheduler import Granularity, Scheduler
from miles_rollout.tasks import JsonlTasks, ReasoningGymTasks, Split, TaskFileError, TaskSource
from miles_rollout.worker import RolloutWorker

_NO_SIGNAL = "no_signal"
_FILTERED_BATCHES, _MIN_FILTERED = 64, 1024
"""A run ends when its filter drops as many groups as so many batches have, and this many, and keeps none."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """Where prompts come from. `held_out` is None when nothing is held out."""

    train: TaskSource
    held_out: TaskSource | None


def make_tasks(config: TaskConfig, seed: int) -> Tasks:
    """Training and held-out tasks.

    Raises:
        InvalidFieldError, TaskFileError: missing file, bad lines, unknown family, nothing left to train on.
        ImportError: reasoning-gym is not installed.
    """
    if config.source is TaskSourceKind.REASONING_GYM:
        return _gym_tasks(config, seed)
    path = config.path
    assert path is not None  # the configuration has checked it
    label = label_check(config, config.reward)
    held_out_label = label_check(config, config.eval_reward or config.reward)

    def read(last: int = 0) -> TaskSource:
        return JsonlTasks(
            path,
            seed=seed,
            shuffle=config.shuffle,
            system_prompt=config.system_prompt,
            check_label=label,
            last=last,
            check_last=held_out_label,
        )

    def read_held_out(file: Path) -> TaskSource:
        return JsonlTasks(
            file,
            shuffle=False,
            system_prompt=config.system_prompt,
            limit=config.eval_size or None,
            check_label=held_out_label,
        )

    if config.eval_path is not None:
        everything, held_out = _both(read, partial(read_held_out, config.eval_path))
        return Tasks(everything, held_out if config.eval_size else None)
    # All of the file at once, so that all bad lines are named together.
    everything = read(config.eval_size)
    if not config.eval_size:
        return Tasks(everything, None)
    left = everything.size - config.eval_size
    if left < 1:
        raise InvalidFieldError(
            "task.eval_size",
            config.eval_size,
            f"{path} has {everything.size} prompts; hold out fewer, or give task.eval_path",
        )

    def part(*, shuffle: bool, skip: int = 0, limit: int | None = None) -> TaskSource:
        return JsonlTasks(path, seed=seed, shuffle=shuffle, system_prompt=config.system_prompt, skip=skip, limit=limit)

    return Tasks(part(shuffle=config.shuffle, limit=left), part(shuffle=False, skip=left))


def _both(first: Callable[[], TaskSource], second: Callable[[], TaskSource]) -> tuple[TaskSource, TaskSource]:
    """Both files, or what is wrong with both of them."""
    try:
        made = first()
    except TaskFileError as error:
        try:
            second()
        except TaskFileError as other:
            raise TaskFileError(error.path, error.problems, other) from None
        raise
    return made, second()


def _gym_tasks(config: TaskConfig, seed: int) -> Tasks:
    assert config.dataset is not None  # the configuration has checked it

    def make(split: Split, size: int, shuffle: bool) -> TaskSource:
        assert config.dataset is not None
        return ReasoningGymTasks(
            config.dataset,
            seed=seed,
            size=size,
            config=config.options,
            split=split,
            template=config.template,
            system_prompt=config.system_prompt,
            shuffle=shuffle,
        )

    held_out = make(Split.HELD_OUT, config.eval_size, False) if config.eval_size else None
    return Tasks(make(Split.TRAIN, config.size, config.shuffle), held_out)


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """The contract's parameters."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
    )


def make_filter(name: str) -> GroupFilter | None:
    """`no_signal`, `none` (which is None), or the function `pkg.mod:fn`.

    Raises:
        InvalidFieldError: unknown name, or a function that cannot be imported.
    """
    if name == _NO_SIGNAL:
        return reward_variance()
    if name == "none":
        return None
    if ":" not in name:
        hint = nearest(name, ("none", _NO_SIGNAL))
        raise InvalidFieldError("rollout.filter", name, f"{hint}use none, {_NO_SIGNAL} or a function as pkg.mod:fn")
    return user_filter(name, field="rollout.filter")


class ArrivedRewards:
    """A group filter that also notes the rewards of every finished group, kept or not.

    The reward curve must not be that of the kept groups only: a filter for gradient signal drops what is solved
    already, and the rest stays at one half however good the policy gets.
    """

    def __init__(self, decide: GroupFilter | None) -> None:
        self._decide = decide
        self._means: list[float] = []

    def __call__(self, group: Group) -> FilterDecision:
        """Note, then decide."""
        rewards = [t.reward for t in group if t.reward is not None]
        if rewards:
            self._means.append(math.fsum(rewards) / len(rewards))
        return self._decide(group) if self._decide is not None else FilterDecision(keep=True)

    def take(self) -> float | None:
        """Mean over the groups that arrived since the last call; independent of their order. None without any."""
        means, self._means = self._means, []
        return math.fsum(means) / len(means) if means else None


@dataclass(frozen=True, slots=True)
class Rollout:
    """The rollout half of a run; `report` gives its metrics of what generation itself counted since the last call."""

    worker: RolloutWorker
    scheduler: Scheduler
    arrived: ArrivedRewards
    report: Callable[[], dict[str, float]]


def make_rollout(
    config: RunConfig,
    source: TaskSource,
    generate: Generate,
    longest_prompt: int,
    group_reward: GroupReward | None = None,
) -> Rollout:
    """Buffer, admission and worker.

    Args:
        config: of the run.
        source: prompts.
        generate: makes answers.
        longest_prompt: tokens that a prompt takes where the configuration sets no limit.
        group_reward: scores whole groups, None where `generate` scores answers.

    Raises:
        InvalidFieldError: values that contradict each other.
    """
    rollout = config.rollout
    arrived = ArrivedRewards(make_filter(rollout.filter))
    if config.buffer_groups < rollout.groups_per_step:
        raise InvalidFieldError(
            "rollout.buffer_groups", config.buffer_groups, f"a batch has {rollout.groups_per_step} groups"
        )
    if rollout.filter == _NO_SIGNAL and rollout.group_size == 1:
        raise InvalidFieldError(
            "rollout.group_size",
            1,
            "a group of one has no reward variance, so rollout.filter = no_signal drops it; use a larger group, "
            "or --rollout.filter none with an estimator that needs no group (trainer.advantage.estimator)",
        )
    tokens = rollout.sampling.max_new_tokens + (rollout.max_prompt_tokens or longest_prompt)
    if rollout.max_in_flight is not None and rollout.max_in_flight < rollout.group_size:
        raise InvalidFieldError(
            "rollout.max_in_flight", rollout.max_in_flight, f"one group alone has {rollout.group_size} answers"
        )
    scheduler = Scheduler(
        batch_groups=rollout.groups_per_step,
        group_size=rollout.group_size,
        depth=config.pipeline_depth,
        max_trajectories=rollout.max_in_flight,
        max_tokens=rollout.max_tokens_in_flight,
        granularity=Granularity(rollout.granularity),
    )
    worker = RolloutWorker(
        source=source,
        generate=generate,
        group_reward=group_reward,
        buffer=GroupBuffer(
            max_groups=config.buffer_groups,
            max_bytes=rollout.buffer_mib * 2**20,
            max_staleness=config.max_staleness,
            group_filter=arrived,
            order=rollout.order,
        ),
        scheduler=scheduler,
        ledger=Ledger(
            on_failure=UnusedPolicy(rollout.on_failure),
            on_stale=UnusedPolicy(rollout.on_stale),
            max_retries=rollout.max_attempts - 1,
            stride=1 + rollout.replace_members,
            order=rollout.order,
        ),
        config=WorkerConfig(
            tokens_per_trajectory=tokens,
            episode_timeout_s=rollout.timeout_s,
            replace_members=rollout.replace_members,
            max_filtered_in_a_row=max(_MIN_FILTERED, _FILTERED_BATCHES * rollout.groups_per_step),
            no_progress_s=config.runtime.step_timeout_s,
        ),
    )
    return Rollout(worker, scheduler, arrived, generate.take_metrics if isinstance(generate, Counting) else dict)
