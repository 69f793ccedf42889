"""Puts the rollout half of a run together; everything that can be refused is refused before the first step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from miles_contracts import Generate, InvalidFieldError
from miles_loop.compose import Rollout, make_rollout, make_tasks
from miles_loop.config import RunConfig
from miles_loop.generation import Generation
from miles_loop.recipe import Recipe
from miles_loop.rollout_workers import RolloutWorkers
from miles_rollout.evaluation import HeldOut
from miles_rollout.generate import check_prompt_lengths
from miles_rollout.router import Router


class Assembly:
    """Renderer, tasks and reward of a run, checked against each other.

    Args:
        recipe: for its renderer.
        config: of the run.
        model: folder with the tokenizer.
        model_context: longest sequence of the model, None when unknown.

    Raises:
        InvalidFieldError and other errors of the house: anything that cannot work, by name.
    """

    def __init__(self, recipe: Recipe, config: RunConfig, model: Path, model_context: int | None) -> None:
        self._config = config
        self._generation = Generation(recipe.renderer, config, model, model_context)
        self._tasks = make_tasks(config.task, config.seed)
        self._longest_prompt = self._check_prompts()

    def _check_prompts(self) -> int:
        """Tokens of the longest prompt among the first of each source."""
        config = self._config.rollout
        most = 0
        limit = self._generation.max_tokens if self._generation.max_tokens is not None else 2**31 - 1
        for source in (self._tasks.train, self._tasks.held_out):
            if source is None:
                continue
            longest = check_prompt_lengths(source, self._generation.renderer, max_tokens=limit)
            most = max(most, longest)
            if config.max_prompt_tokens is not None and longest > config.max_prompt_tokens:
                raise InvalidFieldError(
                    "rollout.max_prompt_tokens",
                    config.max_prompt_tokens,
                    f"a prompt has {longest} tokens; raise the limit or leave such prompts out",
                )
        return most

    @asynccontextmanager
    async def rollout(self, answers: Router | RolloutWorkers) -> AsyncIterator[Rollout]:
        """Worker and buffer, not started; answers are made here with a router, or by rollout workers."""
        if isinstance(answers, RolloutWorkers):
            making: AbstractAsyncContextManager[Generate] = nullcontext(answers.training)
        else:
            making = self._generation.training(answers)
        async with making as generate:
            group = self._generation.scoring.group
            yield make_rollout(self._config, self._tasks.train, generate, self._longest_prompt, group)

    @asynccontextmanager
    async def held_out(self, answers: Router | RolloutWorkers) -> AsyncIterator[list[HeldOut]]:
        """What evaluation measures, answered over a router or by rollout workers; empty when nothing is held out."""
        config, source = self._config, self._tasks.held_out
        if source is None:
            yield []
            return
        samples = config.evaluation.samples
        if isinstance(answers, RolloutWorkers):
            making: AbstractAsyncContextManager[Generate] = nullcontext(answers.evaluation)
        else:
            making = self._generation.evaluation(answers)
        async with making as generate:
            yield [
                HeldOut(
                    name=config.task.name,
                    source=source,
                    generate=generate,
                    samples=samples,
                    ks=config.evaluation.ks or tuple(dict.fromkeys((1, samples))),
                    group_reward=self._generation.evaluation_scoring.group,
                )
            ]
