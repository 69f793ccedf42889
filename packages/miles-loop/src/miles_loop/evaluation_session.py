"""Measures a model folder without training: engines only."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from miles_contracts import InvalidFieldError
from miles_loop.assembly import Assembly
from miles_loop.audit import EngineRecords
from miles_loop.config import RunConfig
from miles_loop.models import max_context, resolve_model
from miles_loop.recipe import Recipe
from miles_loop.run_folder import RunFolder
from miles_loop.runtime import Runtime
from miles_rollout.evaluation import evaluate


async def evaluate_model(recipe: Recipe, config: RunConfig, scratch: Path) -> dict[str, float]:
    """Held-out figures of `config.model`, under their names in `metrics.jsonl`.

    Args:
        recipe: knows models by name.
        config: model, task, engine and evaluation settings count.
        scratch: folder for logs, and for a model that is made for this measurement.

    Raises:
        InvalidFieldError: nothing is held out, or another value that cannot work.
        ProcessDiedError, DeadlineExceededError: an engine did not start.
    """
    folder = RunFolder(scratch)
    folder.logs.mkdir()
    model = await resolve_model(recipe, config.model, config.seed, folder.model, _say)
    runtime = Runtime(config, folder, EngineRecords(), _say, recipe.renderer)
    try:
        await runtime.launch(model, trainer=False)
        assembly = await asyncio.to_thread(Assembly, recipe, config, model, max_context(model))
        await runtime.fleet.wait_ready()
        async with assembly.held_out(runtime.evaluation_answers) as held_out:
            if not held_out:
                raise InvalidFieldError("task.eval_size", 0, "nothing is held out; set it, or give task.eval_path")
            return await evaluate(held_out, episode_timeout_s=config.rollout.timeout_s)
    finally:
        await runtime.stop()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
