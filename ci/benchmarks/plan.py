"""Does `miles plan` predict what is measured? Both in the same run, figure by figure.

    python ci/benchmarks/plan.py [--steps 23] [--json FILE]

The work is that of `async_pipeline.py`: episodes that sample from one engine process and then wait for an environment
whose delay is Pareto. Measured each by itself, and in none of the runs that are predicted:

- the engine's decoding step, by its own account, while 1 to 32 turns are always under way;
- processor time of this process for a turn, while as many turns as a group has are always under way;
- what else a lonely turn takes: its time without the engine's steps and that processor time;
- the trainer's step and the weight update, without rollout.

From them the simulation predicts rollout alone or a pipeline depth; then that is measured. Rates are taken anew between
the runs, and their means before and after a run are its own: a machine that others use too does not stay as it is. (On
such a machine `--scale-s 1 --train-s 1.6` gives the processor less weight.)

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

from async_pipeline import BATCH, DEEP, GROUP, RUNS, WARM, Result, Settings, parse, run, training_alone
from async_workload import EngineProcess, NumberedTasks, delayed_generate, pareto_delay, save_model

from miles_loop.plan.engine import EngineRates
from miles_loop.plan.outcome import Outcome
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.simulate import simulate
from miles_loop.plan.workload import Episode, Lengths, Pareto, RandomWorkload, Turn, Workload
from miles_rollout.engine_client import EngineClient
from miles_rollout.order import TrainingOrder
from miles_rollout.router import Router

PROMPT = 10
LIMIT = 0.15
LOADS = (1, GROUP, 2 * GROUP, 4 * GROUP, 8 * GROUP)
"""Turns that are always under way while the engine is measured."""
TURNS, SETTLE = 20, 3
"""Turns of each of them that are measured, and before that."""
WHOLE = {"trainer_idle": 1.0, "engine_idle": 1.0, "avg_staleness": 1.0}
"""What a figure is a part of: all of the time, or one update."""
FIGURES = ("step_s", *WHOLE)
SMALL = (
    f"A share, or a staleness in updates, that is measured below {LIMIT:g} of its whole is compared by difference, and "
    f"may\nbe off by {LIMIT / 3:g} of that whole: 0.02 and 0.03 are alike, though one is half as much again."
)


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


@dataclass(frozen=True)
class Load:
    """What turns take while so many are always under way.

    Attributes:
        running: sequences in a decoding step, on average.
        step_s: seconds of a decoding step by the engine's account.
        turn_s: seconds of a turn, as its caller sees it.
        handling_s: seconds of this process's processor time for a turn.
    """

    running: float
    step_s: float
    turn_s: float
    handling_s: float


async def under_load(client: EngineClient, turns: int, settings: Settings) -> Load:
    """Measure with `turns` of them under way all the time."""
    generate = delayed_generate(
        Router([client]), scale_s=0.0, alpha=settings.alpha, tail=settings.tail, max_new_tokens=settings.new_tokens
    )
    tasks, taken = NumberedTasks(), []

    async def keep_busy(number: int, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            await generate(tasks.next(), number % GROUP, 0)
            taken.append(time.perf_counter() - began)

    await asyncio.gather(*(keep_busy(number, SETTLE) for number in range(turns)))
    taken.clear()
    before, cpu_s = await client.server_info(), time.process_time()
    await asyncio.gather(*(keep_busy(number, TURNS) for number in range(turns)))
    cpu_s, after = time.process_time() - cpu_s, await client.server_info()
    done = {name: after[name] - before[name] for name in ("busy_s", "steps", "sampled_tokens")}
    return Load(
        running=done["sampled_tokens"] / done["steps"],
        step_s=done["busy_s"] / done["steps"],
        turn_s=statistics.fmean(taken),
        handling_s=cpu_s / len(taken),
    )


@dataclass(frozen=True)
class Rates:
    """All that the simulation is told of the machine."""

    loads: tuple[Load, ...]
    trainer: TrainerRates
    new_tokens: int

    @property
    def engine(self) -> EngineRates:
        """Decoding steps by sequences, and the way to the engine and back."""
        alone = self.loads[0]
        latency_s = max(alone.turn_s - self.new_tokens * alone.step_s - alone.handling_s, 0.0)
        curve = sorted({load.running: load.step_s for load in self.loads}.items())
        return EngineRates(curve=tuple(curve), latency_s=latency_s)

    @property
    def handling_s(self) -> float:
        """Processor time of a turn when a group's come together."""
        return self.loads[LOADS.index(GROUP)].handling_s

    def mean(self, other: Rates) -> Rates:
        """Of two measurements."""
        loads = [
            Load(**{name: (getattr(a, name) + getattr(b, name)) / 2 for name in Load.__dataclass_fields__})
            for a, b in zip(self.loads, other.loads, strict=True)
        ]
        pause_s = (self.trainer.pause_s + other.trainer.pause_s) / 2
        trainer = TrainerRates(fixed_s=self.trainer.fixed_s, pause_s=pause_s)
        return Rates(loads=tuple(loads), trainer=trainer, new_tokens=self.new_tokens)


async def measure_rates(client: EngineClient, folder: Path, settings: Settings) -> Rates:
    """All of them, now."""
    loads = [await under_load(client, turns, settings) for turns in LOADS]
    step_s = await training_alone(client, folder, settings)
    trainer = TrainerRates(fixed_s=settings.train_s, pause_s=max(step_s - settings.train_s, 0.0))
    rates = Rates(loads=tuple(loads), trainer=trainer, new_tokens=settings.new_tokens)
    steps = ", ".join(f"{load.running:.1f}: {1000 * load.step_s:.2f}" for load in loads)
    print(
        f"decoding step by sequences {steps} ms; weight update {1000 * trainer.pause_s:.1f} ms; a turn besides:", end=""
    )
    print(f" {1000 * rates.handling_s:.2f} ms of this process, {1000 * rates.engine.latency_s:.2f} ms of latency")
    return rates


def predict(settings: Settings, work: Workload, rates: Rates, depth: int, train: bool, order: TrainingOrder) -> Outcome:
    """What the simulation makes of it."""
    pipeline = Pipeline(
        batch_groups=BATCH,
        group_size=GROUP,
        depth=depth,
        max_in_flight=settings.in_flight,
        order=order,
        steps=settings.steps,
        warmup=WARM,
        handling_s=rates.handling_s,
    )
    return simulate(pipeline, work, rates.engine, rates.trainer if train else None)


def predict_any(
    settings: Settings, rates: Rates, depth: int, train: bool, order: TrainingOrder, seeds: int = 20
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
        outcomes.append(predict(settings, work, rates, depth, train, order))
    return {name: statistics.fmean(getattr(o, name) for o in outcomes) for name in FIGURES}


def compare(name: str, measured: Result, same: Outcome, spread: dict[str, float]) -> list[dict[str, object]]:
    """Print and return one row a figure."""
    rows: list[dict[str, object]] = []
    print(f"{'':35}{'measured':>10}{'same delays':>14}{'off by':>9}{'any delays':>14}")
    for figure in FIGURES:
        real, made, likely = getattr(measured, figure), getattr(same, figure), spread[figure]
        small = real < LIMIT * WHOLE.get(figure, 0.0)
        error = abs(made - real) / (WHOLE[figure] if small else real)
        good = error <= (LIMIT / 3 if small else LIMIT)
        off = f"{error:.3f}" if small else f"{error:.1%}"
        print(f"{name:20}{figure:15}{real:10.3f}{made:14.3f}{off:>9}{likely:14.3f}  {'' if good else 'OFF'}")
        rows.append(
            {"run": name, "figure": figure, "measured": real, "same_delays": made, "any_delays": likely}
            | {"off_by": error, "by_difference": small, "good": good}
        )
    return rows


async def measure(folder: Path, process: EngineProcess, settings: Settings) -> dict[str, object]:
    """Rates, predictions, measurements."""
    client = process.client()
    try:
        work = SameDelays(settings)
        rows: list[dict[str, object]] = []
        taken: dict[str, object] = {}
        before = await measure_rates(client, folder, settings)
        for name, (depth, order) in {"rollout alone": (DEEP, TrainingOrder.ARRIVAL), **RUNS}.items():
            train = name in RUNS
            real = await run(name, client, folder, settings, depth=depth, train=train, order=order)
            after = await measure_rates(client, folder, settings)
            rates, before = before.mean(after), after
            made = predict(settings, work, rates, depth, train, order)
            rows += compare(name, real, made, predict_any(settings, rates, depth, train, order))
            taken[name] = asdict(rates)
        print(f"\n{SMALL}\n\n{verdict(rows)}")
        return {"settings": asdict(settings), "rates": taken, "rows": rows}
    finally:
        await client.close()


def verdict(rows: list[dict[str, object]]) -> str:
    """How many figures are right, and which are not."""
    bad = [f"{row['figure']} of {row['run']}" for row in rows if not row["good"]]
    small = sum(bool(row["by_difference"]) for row in rows)
    text = f"VERDICT: {len(rows) - len(bad)} of {len(rows)} figures within {LIMIT:.0%} ({small} compared by difference)"
    return f"{text}; off: {', '.join(bad)}" if bad else text


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
