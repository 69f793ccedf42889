"""Does `miles plan` predict what is measured? Both in the same run, figure by figure.

    python ci/benchmarks/plan.py [--steps 23] [--json FILE]

The work is that of `async_pipeline.py`: episodes that sample from one engine process and then wait for an environment
whose delay is Pareto. Three rates are measured, each by itself: the engine's time per token at several numbers of
requests, the trainer's step, the weight update. From them the simulation predicts rollout alone or a pipeline depth;
then that is measured. Rates are taken anew for each of them, before it and after it: a machine that others use too
does not stay as it is. (On such a machine `--scale-s 1 --train-s 1.6` gives the processor less weight.)

Two predictions are shown. *Same delays* replays the delays that the measured episodes really had, so that what is left
is the error of the model. *Any delays* knows their distribution only, as a plan for a run that has not taken place
does: it also differs by the luck of the few steps that are measured.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from async_pipeline import BATCH, DEEP, GROUP, WARM, Result, Settings, parse, run, training_alone
from async_workload import EngineProcess, pareto_delay, save_model

from miles_contracts import SamplingParams
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.outcome import Outcome
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.simulate import simulate
from miles_loop.plan.workload import Episode, Lengths, Pareto, RandomWorkload, Turn, Workload
from miles_rollout.engine_client import EngineClient

PROMPT = 10
LIMIT = 0.15
DEPTHS = {"depth 0": 0, "depth 1": 1, "depth 4": 4, "fully asynchronous": DEEP}
FIGURES = {"step_s": 0.0, "trainer_idle": 0.05, "engine_idle": 0.05, "avg_staleness": 0.25}
"""What is compared, and the difference that is always allowed (a share of 0.001 is not twice one of 0.0005)."""


@dataclass(frozen=True)
class SameDelays:
    """The episodes of the measured runs."""

    settings: Settings

    def episode(self, prompt_index: int, member: int, attempt: int) -> Episode:
        """What the episode of the same prompt and member does when it is measured."""
        s = self.settings
        delay = pareto_delay(prompt_index, member, scale_s=s.scale_s, alpha=s.alpha, tail=s.tail)
        return Episode((Turn(PROMPT, s.new_tokens, delay),))

    def filtered(self, prompt_index: int, attempt: int) -> bool:
        """Nothing is."""
        return False


async def time_per_token(client: EngineClient, requests: int, settings: Settings) -> float:
    """Seconds per token of one of `requests` sequences that run all the time."""
    params = SamplingParams(max_new_tokens=settings.new_tokens, ignore_eos=True)
    taken: list[float] = []

    async def keep_busy(number: int) -> None:
        for turn in range(12):
            began = time.perf_counter()
            await client.generate([1 + (number + i) % 250 for i in range(PROMPT)], params)
            if turn >= 2:
                taken.append(time.perf_counter() - began)

    await asyncio.gather(*(keep_busy(number) for number in range(requests)))
    return statistics.fmean(taken) / settings.new_tokens


async def measure_engine(client: EngineClient, settings: Settings) -> EngineRates:
    """The engine's time per token at several numbers of requests, as a curve."""
    curve = [(n, await time_per_token(client, n, settings)) for n in (1, 2, 4, 8, 16, 32)]
    print("engine:  " + ", ".join(f"{n}: {1000 * t:.2f}" for n, t in curve) + " ms a token by requests")
    return EngineRates(curve=tuple(curve))


async def measure_trainer(client: EngineClient, folder: Path, settings: Settings) -> TrainerRates:
    """The trainer's step by itself; what it takes besides its fixed time is the weight update."""
    step_s = await training_alone(client, folder, settings)
    update_s = max(step_s - settings.train_s, 0.0)
    print(f"trainer: {step_s:.3f} s a step, of which {1000 * update_s:.1f} ms are the weight update")
    return TrainerRates(fixed_s=settings.train_s, pause_s=update_s)


async def measure_rates(client: EngineClient, folder: Path, settings: Settings) -> tuple[EngineRates, TrainerRates]:
    """Both, now."""
    return await measure_engine(client, settings), await measure_trainer(client, folder, settings)


def between(
    before: tuple[EngineRates, TrainerRates], after: tuple[EngineRates, TrainerRates]
) -> tuple[EngineRates, TrainerRates]:
    """The means of two measurements."""
    (engine, trainer), (later, last) = before, after
    curve = tuple((n, (a + b) / 2) for (n, a), (_, b) in zip(engine.curve, later.curve, strict=True))
    pause_s = (trainer.pause_s + last.pause_s) / 2
    return EngineRates(curve=curve), TrainerRates(fixed_s=trainer.fixed_s, pause_s=pause_s)


def predict(
    settings: Settings, work: Workload, rates: EngineRates, trainer: TrainerRates | None, depth: int
) -> Outcome:
    """What the simulation makes of it."""
    pipeline = Pipeline(
        batch_groups=BATCH,
        group_size=GROUP,
        depth=depth,
        max_in_flight=settings.in_flight,
        steps=settings.steps,
        warmup=WARM,
    )
    return simulate(pipeline, work, rates, trainer)


def predict_any(
    settings: Settings, rates: EngineRates, trainer: TrainerRates | None, depth: int, seeds: int = 20
) -> dict[str, float]:
    """Means over many runs that know the distribution only."""
    outcomes = []
    for seed in range(seeds):
        work = RandomWorkload(
            turns=Lengths(1),
            prompt=Lengths(PROMPT),
            observation=Lengths(0),
            sampled=Lengths(settings.new_tokens),
            delay=Pareto(settings.scale_s, settings.alpha, settings.tail),
            seed=seed,
        )
        outcomes.append(predict(settings, work, rates, trainer, depth))
    return {name: statistics.fmean(getattr(o, name) for o in outcomes) for name in FIGURES}


def compare(name: str, measured: Result, same: Outcome, spread: dict[str, float]) -> list[dict[str, object]]:
    """Print and return one row a figure."""
    rows: list[dict[str, object]] = []
    for figure, allowed in FIGURES.items():
        real, made, likely = getattr(measured, figure), getattr(same, figure), spread[figure]
        error = abs(made - real) / real if real else float(made != real)
        good = error <= LIMIT or abs(made - real) <= allowed
        print(f"{name:20}{figure:15}{real:10.3f}{made:14.3f}{error:9.1%}{likely:14.3f}  {'' if good else 'OFF'}")
        rows.append(
            {"run": name, "figure": figure, "measured": real, "same_delays": made, "error": error, "any_delays": likely}
            | {"good": good}
        )
    return rows


async def measure(folder: Path, process: EngineProcess, settings: Settings) -> dict[str, object]:
    """Rates, predictions, measurements."""
    client = process.client()
    try:
        work = SameDelays(settings)
        rows: list[dict[str, object]] = []
        taken: dict[str, object] = {}
        for name, depth in {"rollout alone": None, **DEPTHS}.items():
            deep, train = (DEEP, False) if depth is None else (depth, True)
            before = await measure_rates(client, folder, settings)
            real = await run(name, client, folder, settings, depth=deep, train=train)
            rates, trainer = between(before, await measure_rates(client, folder, settings))
            made = predict(settings, work, rates, trainer if train else None, deep)
            likely = predict_any(settings, rates, trainer if train else None, deep)
            print(f"{'':35}{'measured':>10}{'same delays':>14}{'error':>9}{'any delays':>14}")
            rows += compare(name, real, made, likely)
            taken[name] = {"engine": asdict(rates), "trainer": asdict(trainer)}
        bad = [row for row in rows if not row["good"]]
        print(f"\n{len(rows) - len(bad)} of {len(rows)} figures within {LIMIT:.0%}, or the difference always allowed")
        return {"settings": asdict(settings), "rates": taken, "rows": rows}
    finally:
        await client.close()


def main() -> None:
    """Command line."""
    settings, target = parse(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        process = EngineProcess(folder)
        try:
            result = asyncio.run(measure(folder, process, settings))
        finally:
            process.end()
    if target is not None:
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
