"""The learning-rate factor is a pure function of the number of updates made, so resuming needs no state."""

from __future__ import annotations

import math

from miles_trainer.config import ScheduleConfig


def factor(updates: int, config: ScheduleConfig) -> float:
    """Factor of the base learning rate for the update after `updates` updates.

    Warm-up gives (updates + 1) / warmup_steps, so the first update already moves; linear and cosine then fall
    from 1 to `final_factor`, which they reach at `total_steps` and keep.
    """
    if updates < config.warmup_steps:
        return (updates + 1) / config.warmup_steps
    if config.kind == "constant" or config.total_steps is None:
        return 1.0
    progress = min((updates - config.warmup_steps) / (config.total_steps - config.warmup_steps), 1.0)
    shape = 1.0 - progress if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_factor + (1.0 - config.final_factor) * shape
