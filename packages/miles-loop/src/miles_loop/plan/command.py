"""`miles plan`: what a run of this model, batch, split of GPUs and tail would be like.

Layers of the question, later ones win: preset < run (`--from`) < configuration file < command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import msgspec

from miles_contracts import InvalidFieldError
from miles_loop.arguments import Flag, Parsed, split_words
from miles_loop.names import nearest
from miles_loop.options import Layer, build, options, read_toml
from miles_loop.plan.config import DEPTHS_REMEDY, ENDLESS, PlanConfig, wrong_depth
from miles_loop.plan.settings import TrainerRates
from miles_loop.plan.simulate import simulate
from miles_loop.plan.text import PICTURES, Answer, Measured, draw, name_of, table

SHORT_NAMES = {
    "model": "hardware.model",
    "gpu": "hardware.gpu",
    "train-gpus": "hardware.train_gpus",
    "rollout-gpus": "hardware.rollout_gpus",
    "batch": "pipeline.batch",
    "group-size": "pipeline.group_size",
    "in-flight": "pipeline.in_flight",
    "depths": "pipeline.depths",
    "rollout-workers": "pipeline.rollout_workers",
    "trainer-ranks": "trainer.ranks",
    "turns": "workload.turns",
    "new-tokens": "workload.new_tokens",
    "delay": "workload.delay_s",
    "tail": "workload.tail",
    "steps": "pipeline.steps",
    "seed": "pipeline.seed",
}
"""Common options and the dotted options they stand for."""
FLAGS = (
    Flag("preset", "NAME", "A published run to start from; --preset list names them."),
    Flag("from", "RUN", "A run folder whose measured rates are used."),
    Flag("config", "FILE", "A TOML file with any of the options below."),
    Flag("plot", "FILE", "Draw the answer; the name ends in .png, .pdf or .svg."),
    Flag("json", "", "Print one JSON object."),
)
LONG = 50_000
"""Trajectories at one depth from which on the user is told that the answer takes a while."""
SUMMARY = "Simulates an asynchronous run and says how long a step takes, who waits for whom, and how stale the data is."
EXAMPLES = (
    (
        "a 30B mixture of experts on two nodes, heavy-tailed environment",
        "miles plan --model qwen3-30b-a3b --gpu h100 --train-gpus 8 --rollout-gpus 8 --batch 256 --delay 20 --tail 50",
    ),
    ("a published run, its prediction beside its measurement", "miles plan --preset glm-5.2-terminal"),
    ("what a run of yours would gain from another depth", "miles plan --from runs/first"),
)


def presets() -> list[str]:
    """Names of the published runs that come with the planner."""
    folder = files("miles_loop.plan") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name != "__init__.py")


def _preset(name: str) -> Layer:
    if name not in presets():
        raise InvalidFieldError("--preset", name, f"{nearest(name, presets())}use {', '.join(presets())}")
    return read_toml(Path(str(files("miles_loop.plan") / "presets" / f"{name}.toml")))


def question(parsed: Parsed) -> PlanConfig:
    """The configuration that a command line asks for.

    Raises:
        InvalidFieldError: naming field, value and remedy.
    """
    layers: list[Layer] = []
    wrong = wrong_depth(parsed.settings.get("pipeline", {}).get("depths", ()))
    if wrong is not None:
        raise InvalidFieldError("--depths", wrong, DEPTHS_REMEDY)
    if "preset" in parsed.flags:
        layers.append(_preset(parsed.flags["preset"]))
    if "from" in parsed.flags:
        from miles_loop.plan.measured import layer_of_run

        layers.append(layer_of_run(Path(parsed.flags["from"])))
    if "config" in parsed.flags:
        layers.append(read_toml(Path(parsed.flags["config"])))
    return build(PlanConfig, [*layers, parsed.settings])


def answer(config: PlanConfig) -> Answer:
    """Simulate what was asked for.

    Raises:
        InvalidFieldError: something is missing or does not fit.
        PlanError: the pipeline cannot run.
    """
    placement = config.placement()
    engine, engines = config.engine_rates(placement)
    trainer = config.trainer_rates(placement)
    work = config.workload_model()
    outcomes = {
        name_of(d): simulate(config.pipeline_of(d, engines), work, engine, trainer) for d in config.pipeline.depths
    }
    # Alone, rollout never waits for the trainer: it has no depth, no limit of age, and always room for what is done.
    free = replace(config.pipeline_of(ENDLESS, engines), max_staleness=None, buffer_groups=ENDLESS)
    alone = simulate(free, work, engine, None)
    tokens = sum(r.tokens for r in alone.records) / len(alone.records)
    published = config.published
    return Answer(
        outcomes=outcomes,
        rollout_alone_s=alone.step_s,
        training_alone_s=trainer.step_s(tokens),
        assumptions=(
            *(placement.assumptions() if placement is not None else _rates(trainer)),
            *config.processes(),
            *config.notes,
        ),
        published=None
        if published.step_s is None
        else Measured(
            step_s=published.step_s,
            median=published.statistic == "median",
            source=published.source,
            depth=name_of(published.depth),
        ),
    )


def _rates(trainer: TrainerRates) -> tuple[str, ...]:
    return (
        f"training: {trainer.fixed_s:.3g} s and {1e6 * trainer.per_token_s:.3g} us a token; weight update: engines "
        f"paused for {trainer.pause_s:.3g} s of {trainer.prepare_s + trainer.pause_s:.3g} s",
    )


def run(argv: Sequence[str]) -> int:
    """Carry out one command line after the word `plan`.

    Raises:
        InvalidFieldError, PlanError: see `question` and `answer`.
    """
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(help_text())
        return 0
    parsed = split_words(argv, FLAGS, options(PlanConfig), SHORT_NAMES)
    if parsed.words:
        raise InvalidFieldError("argument", parsed.words[0], "options start with --; a value follows its option")
    if parsed.flags.get("preset") == "list":
        sys.stdout.writelines(f"{name}\n" for name in presets())
        return 0
    target = Path(parsed.flags.get("plot", "plan.png"))
    if target.suffix.lower() not in PICTURES:
        raise InvalidFieldError("--plot", str(target), f"use a name that ends in {', '.join(PICTURES)}")
    config = question(parsed)
    size = config.pipeline.batch * config.pipeline.steps
    if size > LONG:
        sys.stderr.write(f"simulating {size:,} trajectories a depth ...\n")
    found = answer(config)
    if "plot" in parsed.flags:
        try:
            draw(found, target)
        except OSError as error:
            raise InvalidFieldError("--plot", str(target), f"cannot be written: {error.strerror}") from error
    sys.stdout.write(msgspec.json.encode(found.as_json()).decode() + "\n" if "json" in parsed.flags else table(found))
    return 0


def help_text() -> str:
    """`miles plan --help`."""
    from miles_loop.reference import entry, placeholder

    known = {o.path: o for o in options(PlanConfig)}
    out = ["usage: miles plan [options]", "", SUMMARY, "", "common options:"]
    for name, path in SHORT_NAMES.items():
        out += entry(f"--{name} {placeholder(known[path])}", known[path].description, known[path].default)
    for flag in FLAGS:
        out += entry(f"--{flag.name} {flag.value}".rstrip(), flag.help)
    out += ["", "all options (in a configuration file: keys of TOML tables):"]
    for option in known.values():
        out += entry(f"--{option.path} {placeholder(option)}", option.description, option.default)
    out += ["", "examples:"]
    for comment, line in EXAMPLES:
        out += [f"  # {comment}", f"  {line}"]
    return "\n".join(out) + "\n"
