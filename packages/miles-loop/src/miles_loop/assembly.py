"""Puts the rollout half of a run together; everything that can be refused is refused before the first step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from miles_contracts import Agent, Generate, InvalidFieldError, Reward
from miles_loop.compose import Rollout, make_rollout, make_tasks, sampling_params
from miles_loop.config import RunConfig, SamplingConfig
from miles_loop.fleet import Fleet
from miles_loop.models import num_experts
from miles_loop.recipe import Recipe
from miles_loop.scoring import task_scoring
from miles_rollout.evaluation import HeldOut
from miles_rollout.generate import check_prompt_lengths
from miles_rollout.imports import load_object
from miles_rollout.renderers import load_renderer
from miles_rollout.router import Router

EVALUATION_SEED_OFFSET = 2**31
"""Keeps the sampling seeds of evaluation apart from those of training."""


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
        self._renderer = load_renderer(model, None if recipe.renderer == "auto" else recipe.renderer)
        self._tasks = make_tasks(config.task, config.seed)
        self._scoring, self._eval_scoring = task_scoring(config.task)
        self._experts = num_experts(model) if config.trainer.replay.enabled else None
        self._agent: Agent | None = load_object(config.task.agent, field="task.agent") if config.task.agent else None
        limits = [limit for limit in (config.engine.max_context, model_context) if limit is not None]
        self._max_tokens = min(limits) if limits else None
        self._longest_prompt = self._check_prompts()

    def _check_prompts(self) -> int:
        """Tokens of the longest prompt among the first of each source."""
        config = self._config.rollout
        most = 0
        limit = self._max_tokens if self._max_tokens is not None else 2**31 - 1
        for source in (self._tasks.train, self._tasks.held_out):
            if source is None:
                continue
            longest = check_prompt_lengths(source, self._renderer, max_tokens=limit)
            most = max(most, longest)
            if config.max_prompt_tokens is not None and longest > config.max_prompt_tokens:
                raise InvalidFieldError(
                    "rollout.max_prompt_tokens",
                    config.max_prompt_tokens,
                    f"a prompt has {longest} tokens; raise the limit or leave such prompts out",
                )
        return most

    @asynccontextmanager
    async def rollout(self, fleet: Fleet) -> AsyncIterator[Rollout]:
        """Worker and buffer over a fleet, not started."""
        config = self._config
        async with self._generate(
            config.rollout.sampling, fleet.router, config.seed, self._scoring.answer, self._experts
        ) as generate:
            try:
                yield make_rollout(config, self._tasks.train, generate, self._longest_prompt, self._scoring.group)
            finally:
                await self._scoring.close()

    @asynccontextmanager
    async def held_out(self, router: Router) -> AsyncIterator[list[HeldOut]]:
        """What evaluation measures, answered by the engines of `router`; empty when nothing is held out."""
        config, source = self._config, self._tasks.held_out
        if source is None:
            yield []
            return
        samples, seed = config.evaluation.samples, config.seed + EVALUATION_SEED_OFFSET
        async with self._generate(
            config.evaluation.sampling, router, seed, self._eval_scoring.answer, None
        ) as generate:
            task = HeldOut(
                name=config.task.name,
                source=source,
                generate=generate,
                samples=samples,
                ks=config.evaluation.ks or tuple(dict.fromkeys((1, samples))),
                group_reward=self._eval_scoring.group,
            )
            try:
                yield [task]
            finally:
                await self._eval_scoring.close()

    @asynccontextmanager
    async def _generate(
        self, sampling: SamplingConfig, router: Router, seed: int, reward: Reward | None, experts: int | None
    ) -> AsyncIterator[Generate]:
        """How one answer is made; for an agent's task one episode, with a session server of its own.

        `experts` asks the engines for their expert choices, which the trainer replays.
        """
        config = self._config
        if self._agent is None:
            from miles_rollout.generate import single_turn

            yield single_turn(
                renderer=self._renderer,
                router=router,
                reward=reward,
                sampling=sampling_params(sampling),
                run_seed=seed,
                max_tokens=self._max_tokens,
                routing=experts is not None,
                num_experts=experts,
                reward_timeout_s=config.rollout.reward_timeout_s,
            )
            return
        from miles_rollout.session import SessionConfig, SessionServer, agent_generate

        settings = SessionConfig(
            default_max_tokens=sampling.max_new_tokens,
            max_context_tokens=self._max_tokens,
            engine_timeout_s=config.rollout.timeout_s,
            record_routing=experts is not None,
            num_experts=experts,
        )
        async with SessionServer(router, self._renderer, settings) as server:
            yield agent_generate(
                self._agent,
                server,
                sampling=sampling_params(sampling),
                run_seed=seed,
                timeout_s=config.rollout.timeout_s,
                reward=reward,
            )
