"""How one answer is made and scored: renderer, rewards and agent of a run, over a router that is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from miles_contracts import Agent, Generate, Reward
from miles_loop.compose import sampling_params
from miles_loop.config import RunConfig, SamplingConfig
from miles_loop.models import num_experts
from miles_loop.scoring import CountingService, Scoring, task_scoring
from miles_rollout.imports import load_object
from miles_rollout.renderers import Renderer, load_renderer
from miles_rollout.rewards import RemoteReward
from miles_rollout.router import Router

EVALUATION_SEED_OFFSET = 2**31
"""Keeps the sampling seeds of evaluation apart from those of training."""


class Generation:
    """Makes answers in this process: that of the driver, or of a rollout worker.

    Args:
        renderer: name of the family's renderer, `auto` to recognise it.
        config: of the run.
        model: folder with the tokenizer.
        model_context: longest sequence of the model, None when unknown.

    Raises:
        InvalidFieldError and other errors of the house: anything that cannot work, by name.

    Attributes:
        renderer: renders prompts.
        max_tokens: longest prompt with its answer, None for no bound.
    """

    def __init__(self, renderer: str, config: RunConfig, model: Path, model_context: int | None) -> None:
        self._config = config
        self.renderer: Renderer = load_renderer(model, None if renderer == "auto" else renderer)
        self._scoring, self._eval_scoring = task_scoring(config.task, config.rollout.reward_timeout_s)
        self._experts = num_experts(model) if config.trainer.replay.enabled else None
        self._agent: Agent | None = load_object(config.task.agent, field="task.agent") if config.task.agent else None
        limits = [limit for limit in (config.engine.max_context, model_context) if limit is not None]
        self.max_tokens = min(limits) if limits else None

    @property
    def scoring(self) -> Scoring:
        """How training answers are scored."""
        return self._scoring

    @property
    def evaluation_scoring(self) -> Scoring:
        """How held-out answers are scored."""
        return self._eval_scoring

    @asynccontextmanager
    async def training(self, router: Router) -> AsyncIterator[Generate]:
        """How a training answer is made on the engines of `router`."""
        config = self._config
        async with self._generate(
            config.rollout.sampling, router, config.seed, self._scoring.answer, self._experts
        ) as generate:
            service = self._scoring.answer
            try:
                yield CountingService(generate, service) if isinstance(service, RemoteReward) else generate
            finally:
                await self._scoring.close()

    @asynccontextmanager
    async def evaluation(self, router: Router) -> AsyncIterator[Generate]:
        """How an answer to a held-out prompt is made."""
        config = self._config
        seed = config.seed + EVALUATION_SEED_OFFSET
        async with self._generate(
            config.evaluation.sampling, router, seed, self._eval_scoring.answer, None
        ) as generate:
            try:
                yield generate
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
                renderer=self.renderer,
                router=router,
                reward=reward,
                sampling=sampling_params(sampling),
                run_seed=seed,
                max_tokens=self.max_tokens,
                routing=experts is not None,
                num_experts=experts,
                reward_timeout_s=config.rollout.reward_timeout_s,
            )
            return
        from miles_rollout.session import SessionConfig, SessionServer, agent_generate

        settings = SessionConfig(
            default_max_tokens=sampling.max_new_tokens,
            max_context_tokens=self.max_tokens,
            engine_timeout_s=config.rollout.timeout_s,
            record_routing=experts is not None,
            num_experts=experts,
        )
        async with SessionServer(router, self.renderer, settings) as server:
            yield agent_generate(
                self._agent,
                server,
                sampling=sampling_params(sampling),
                run_seed=seed,
                timeout_s=config.rollout.timeout_s,
                reward=reward,
            )
