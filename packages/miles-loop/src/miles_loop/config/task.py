"""Settings of the problems: where they come from, what is held out, how answers are scored."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from miles_loop.config.section import NonNegative, Positive, Seconds, Section


class TaskSourceKind(StrEnum):
    """Where prompts come from."""

    JSONL = "jsonl"
    REASONING_GYM = "reasoning_gym"


class RewardScope(StrEnum):
    """What a reward function of the user is given."""

    ANSWER = "answer"
    BATCH = "batch"
    GROUP = "group"


class TaskConfig(Section):
    """The problems to train on, the held-out problems to evaluate on, and how answers are scored."""

    preset: str | None = None
    """Name of a task preset of the recipe; its values are the defaults of this section."""
    name: str = "task"
    """Name of the task in metrics: `eval/<name>/reward`."""
    source: TaskSourceKind = TaskSourceKind.JSONL
    """`jsonl` (a file of prompts) or `reasoning_gym` (procedurally generated problems)."""
    path: Path | None = None
    """JSONL file with the training prompts; one object a line: `prompt` (text or messages), `label`, `metadata`."""
    eval_path: Path | None = None
    """JSONL file with the held-out prompts; without it the last `eval_size` lines of `path` are held out."""
    dataset: str | None = None
    """reasoning-gym: which kind of problem it generates, for example `basic_arithmetic`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym: settings of that kind of problem, for example `task.options.max_digits`."""
    size: Positive = 4096
    """reasoning-gym: number of different training problems before the stream repeats."""
    eval_size: NonNegative = 64
    """Number of held-out problems."""
    shuffle: bool = True
    """Shuffle the training prompts anew in every epoch (by the run's seed)."""
    template: str = "{question}"
    """reasoning-gym: text of the user message; `{question}` is replaced by the problem."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    reward: str = "exact"
    """How a response is scored: `exact`, `numeric`, `maths` (math-verify), `code` (the program in the answer runs
    against `metadata.tests` in a sandbox), `verifier` (reasoning-gym's own), the http:// or https:// address of a
    reward service, or your function `pkg.mod:fn`."""
    reward_scope: RewardScope = RewardScope.ANSWER
    """How your reward function is called: `answer` fn(task, response), `batch` fn(tasks, responses) with all that
    arrive together, `group` fn(task, trajectories) with all answers to one prompt; the last two return a list."""
    reward_request_timeout_s: Seconds | None = None
    """A reward service: deadline of one request, which is then made again; default: `rollout.reward_timeout_s` shared
    equally by all tries."""
    reward_retries: NonNegative = 3
    """A reward service: how often a request that failed, hung or was answered with 429 or 5xx is made again."""
    eval_reward: str | None = None
    """How held-out responses are scored, when it differs from `reward` (partial credit in training, say)."""
    agent: str | None = None
    """Import path `pkg.mod:fn` of an agent that talks to the session server; without it one answer per prompt."""

    @model_validator(mode="after")
    def _source_is_named(self) -> TaskConfig:
        if self.source is TaskSourceKind.JSONL and self.path is None:
            raise ValueError("path: a jsonl task needs task.path (a file of prompts)")
        if self.source is TaskSourceKind.REASONING_GYM and self.dataset is None:
            raise ValueError("dataset: a reasoning_gym task needs task.dataset (which kind of problem)")
        return self
