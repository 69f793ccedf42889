"""The typed configuration of `miles plan`: every assumption is a value that may be set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from miles_contracts import InvalidFieldError
from miles_loop.config import Section, UnusedPrompts
from miles_loop.config.section import NonNegative, Positive
from miles_loop.plan.engine import EngineRates
from miles_loop.plan.hardware import Format, Placement, find_gpu
from miles_loop.plan.settings import Pipeline, TrainerRates
from miles_loop.plan.workload import Lengths, Pareto, RandomWorkload
from miles_rollout.ledger import UnusedPolicy
from miles_rollout.order import TrainingOrder
from miles_rollout.scheduler import Granularity
from miles_sync.models import ModelShape, find_model

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Risk = Annotated[float, Field(ge=0, lt=1)]
ASYNC = "async"
ENDLESS = 10**6
"""Pipeline depth of a fully asynchronous run: what is in flight, and not the depth, bounds it."""

MOST_TRAJECTORIES = 10**6
"""Most trajectories simulated at one depth: more would take hours, and no figure would be another."""
DEPTHS_REMEDY = "use whole numbers from 0 and async"


def wrong_depth(values: Iterable[object]) -> object | None:
    """The first value that is no pipeline depth, as configuration or command line has it; None when all are."""
    for value in values:
        number = value if isinstance(value, str) else str(value) if type(value) is int else ""
        if value != ASYNC and not (number.isascii() and number.isdecimal()):
            return value
    return None


def _find_shape(model: str) -> ModelShape:
    try:
        return find_model(model).shape()
    except InvalidFieldError as error:
        if error.field != "model":
            raise
        remedy = f"{error.remedy}; or give engine.* and trainer.* instead"
        raise InvalidFieldError("hardware.model", error.value, remedy) from error


class PipelineSection(Section):
    """Shape of the run."""

    batch: Positive = 64
    """Trajectories of one batch."""
    group_size: Positive = 8
    """Trajectories of one group (prompt)."""
    depths: tuple[NonNegative | Literal["async"], ...] = (0, 1, "async")
    """Pipeline depths to compare: batches that rollout may run ahead; `async` is bounded by `in_flight` alone."""
    in_flight: Positive | None = None
    """Most trajectories in flight; default: 2 x `batch`."""
    buffer_groups: Positive | None = None
    """Most finished groups that wait; default: 2 batches."""
    max_staleness: Positive | Literal["auto"] | None = "auto"
    """Oldest usable group in updates; `auto` is a run's default, the depth + 1 (no limit for `async`); `none`: any."""
    granularity: Granularity = Granularity.SAMPLE
    """When a place in flight is free again: with each trajectory (`sample`) or with its `group`."""
    order: TrainingOrder = TrainingOrder.ARRIVAL
    """Finished groups are trained as they come, oldest weights first (`arrival`), or strictly in the order of their
    prompts (`prompt`)."""
    on_unused: UnusedPrompts = UnusedPrompts.RETRY
    """The prompt of a failed or stale group: tried again (`retry`) or dropped (`drop`)."""
    update_mode: Literal["retract", "in_place"] = "in_place"
    """Sequences that run while weights change: computed again (`retract`) or continued (`in_place`)."""
    prefix_cache: bool = True
    """Later turns of a trajectory find what their engine has computed under the same weights."""
    rollout_workers: Positive = 1
    """Processes that make trajectories (the driver alone counts as one); they share the turns."""
    handling_s: Amount = 0.0
    """Seconds of such a process for each turn; turns wait for each other there."""
    steps: Positive = 60
    """Optimiser steps to simulate."""
    warmup: NonNegative | None = None
    """Steps at the start that no figure counts; default: a fifth, 10 at most."""
    seed: NonNegative = 0
    """Seed of everything random."""

    @field_validator("depths", mode="before")
    @classmethod
    def _depths_are_depths(cls, values: object) -> object:
        if isinstance(values, (list, tuple)) and wrong_depth(values) is not None:
            raise ValueError(DEPTHS_REMEDY)
        return values

    @model_validator(mode="after")
    def _size_is_sane(self) -> PipelineSection:
        total = self.batch * self.steps
        if total > MOST_TRAJECTORIES:
            raise ValueError(
                f"{'batch' if self.batch >= self.steps else 'steps'}: {self.steps} steps of {self.batch} are "
                f"{total:,} trajectories, and at most {MOST_TRAJECTORIES:,} are simulated; use a smaller --batch or "
                "fewer --steps"
            )
        if self.in_flight is not None and self.in_flight > MOST_TRAJECTORIES:
            raise ValueError(f"in_flight: at most {MOST_TRAJECTORIES:,} are simulated")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> PipelineSection:
        if self.batch % self.group_size:
            raise ValueError(f"group_size: a batch of {self.batch} is no whole number of such groups")
        if self.in_flight is not None and self.in_flight < self.group_size:
            raise ValueError(f"in_flight: one group needs {self.group_size}")
        if not self.depths:
            raise ValueError("depths: give at least one depth")
        return self


class WorkloadSection(Section):
    """What one trajectory asks for."""

    turns: Above = 1.0
    """Requests of one trajectory."""
    turns_spread: Amount = 0.0
    """Coefficient of variation of `turns`."""
    prompt_tokens: Amount = 512.0
    """Tokens of the first prompt."""
    observation_tokens: Amount = 0.0
    """Tokens that the environment adds between two turns."""
    new_tokens: Above = 1024.0
    """Tokens sampled in one turn."""
    new_tokens_spread: Amount = 0.0
    """Coefficient of variation of `new_tokens` (log-normal)."""
    max_new_tokens: Positive | None = None
    """Most tokens of one turn."""
    delay_s: Amount = 0.0
    """Mean seconds of the environment after each turn (reward and tools)."""
    alpha: Above = 1.5
    """Exponent of the delays' Pareto distribution; smaller is heavier."""
    tail: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 20.0
    """Longest delay over the shortest; 1 makes all delays equal."""
    failure_rate: Risk = 0.0
    """Share of trajectories that fail."""
    filter_rate: Risk = 0.0
    """Share of groups that the filter refuses."""


class HardwareSection(Section):
    """Model and GPUs, for rates from data sheets."""

    model: str | None = None
    """A model known by name (`glm-5.2`, `glm-4.5-air`, `deepseek-v3.2`, `kimi-k2`, `qwen3-0.6b`, `qwen3-4b`,
    `qwen3-8b`, `qwen3-32b`, `qwen3-30b-a3b`, `qwen3-235b-a22b`), or a folder with config.json."""
    gpu: str | None = None
    """The GPU, for example `h100` or `gb300`."""
    train_gpus: Positive | None = None
    """GPUs of the trainer."""
    rollout_gpus: Positive | None = None
    """GPUs of all engines together."""
    engine_gpus: Positive | None = None
    """GPUs of one engine; default: the fewest (a power of two) that hold the weights and as much context again / 4."""
    weights: Format = Format.BF16
    """Format of the engines' weights and arithmetic."""
    cache: Format = Format.BF16
    """Format of the engines' keys and values."""
    training: Format = Format.BF16
    """Format of the trainer's arithmetic."""
    bandwidth_use: Share = 0.7
    """Share of the memory bandwidth that decoding reaches."""
    decode_use: Share = 0.5
    """Share of the arithmetic peak that decoding reaches."""
    prefill_use: Share = 0.4
    """Share of the arithmetic peak that prompts reach."""
    train_use: Share | None = None
    """Share of the arithmetic peak that training reaches (MFU); default: 0.35, for a mixture of experts 0.15."""
    layer_overhead_us: Amount | None = None
    """Microseconds per layer and decoding step besides reading and arithmetic; default: 20, + 60 for an engine of
    several GPUs, + 70 for a mixture of experts."""
    memory_fraction: Share = 0.85
    """Share of the memory for weights and cache."""
    tokens_per_step: Above = 1.0
    """Tokens a sequence gains in one decoding step; above 1 with speculative decoding."""
    max_running: Positive = 256
    """Sequences that one engine runs at the same time."""
    recompute: bool = True
    """Activations are computed again in the backward pass."""
    logprob_passes: NonNegative = 1
    """Forward passes of the trainer besides the one that is trained (old policy, reference)."""
    stream_gb_per_s: Above | None = None
    """GB/s per GPU and way at which optimiser state is streamed from disk; none: it stays in memory."""
    update_gb_per_s: Above = 12.8
    """GB/s at which weights cross to the engines, pause to return; broadcast about 12.8, peer to peer about 88."""


class EngineSection(Section):
    """Measured rates of one engine; what is set wins over the data sheet."""

    replicas: Positive | None = None
    """Number of engines."""
    base_s: Amount | None = None
    """Seconds of a decoding step that do not depend on the load."""
    per_sequence_s: Amount | None = None
    """Seconds of a decoding step that one more sequence costs."""
    per_context_token_s: Amount | None = None
    """Seconds of a decoding step that one more token of context costs."""
    prefill_s_per_token: Amount | None = None
    """Seconds for one token of prompt."""
    tokens_per_step: Above | None = None
    """Tokens a sequence gains in one decoding step."""
    max_running: Positive | None = None
    """Sequences that run at the same time."""
    kv_tokens: Positive | None = None
    """Tokens of context that fit."""
    latency_s: Amount | None = None
    """Seconds that a turn takes besides the engine's own time (network, server)."""


class TrainerSection(Section):
    """Measured rates of the trainer; what is set wins over the data sheet."""

    fixed_s: Amount | None = None
    """Seconds of an optimiser step that do not depend on the batch."""
    per_token_s: Amount | None = None
    """Seconds for one token of the batch."""
    prepare_s: Amount | None = None
    """Seconds of a weight update while engines go on."""
    pause_s: Amount | None = None
    """Seconds of a weight update while engines are paused."""
    overhead_s: Amount | None = None
    """Seconds of a step for anything else."""
    ranks: Positive | None = None
    """Data-parallel trainer ranks, for rates that were measured; default: `measured_ranks`."""
    measured_ranks: Positive = 1
    """Ranks that `per_token_s` was measured with; it shrinks as their number grows, nothing else does."""


class PublishedSection(Section):
    """What somebody measured, to be shown beside the prediction."""

    step_s: Above | None = None
    """Seconds of a step."""
    statistic: Literal["mean", "median"] = "median"
    """Which of all steps."""
    source: str = ""
    """Where the figure is from."""
    depth: NonNegative | Literal["async"] = "async"
    """Pipeline depth it was measured at."""


class PlanConfig(Section):
    """One question to the planner."""

    pipeline: PipelineSection = PipelineSection()
    workload: WorkloadSection = WorkloadSection()
    hardware: HardwareSection = HardwareSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    published: PublishedSection = PublishedSection()
    notes: tuple[str, ...] = ()
    """Assumptions in words, shown with the answer."""

    @property
    def in_flight(self) -> int:
        """Most trajectories in flight, with the default resolved."""
        return self.pipeline.in_flight or 2 * self.pipeline.batch

    def workload_model(self) -> RandomWorkload:
        """The episodes."""
        w = self.workload
        return RandomWorkload(
            turns=Lengths(w.turns, w.turns_spread),
            prompt=Lengths(w.prompt_tokens),
            observation=Lengths(w.observation_tokens),
            sampled=Lengths(w.new_tokens, w.new_tokens_spread, w.max_new_tokens),
            delay=Pareto.of_mean(w.delay_s, alpha=w.alpha, tail=w.tail),
            failure_rate=w.failure_rate,
            filter_rate=w.filter_rate,
            seed=self.pipeline.seed,
        )

    def pipeline_of(self, depth: int | str, engines: int) -> Pipeline:
        """The shape of the run at one depth."""
        p = self.pipeline
        unused = UnusedPolicy(p.on_unused)
        limit = p.max_staleness
        if isinstance(limit, str):
            limit = None if isinstance(depth, str) else depth + 1
        return Pipeline(
            batch_groups=p.batch // p.group_size,
            group_size=p.group_size,
            depth=ENDLESS if isinstance(depth, str) else depth,
            max_in_flight=self.in_flight,
            buffer_groups=p.buffer_groups,
            max_staleness=limit,
            granularity=p.granularity,
            order=p.order,
            on_failure=unused,
            on_stale=unused,
            retract=p.update_mode == "retract",
            engines=engines,
            steps=p.steps,
            warmup=min(p.steps // 5, 10) if p.warmup is None else p.warmup,
            prefix_cache=p.prefix_cache,
            rollout_workers=p.rollout_workers,
            handling_s=p.handling_s,
        )

    def placement(self) -> Placement | None:
        """Model and GPUs; None when no model is named.

        Raises:
            InvalidFieldError: something is missing, or does not fit.
        """
        h = self.hardware
        if h.model is None:
            return None
        for name in ("gpu", "train_gpus", "rollout_gpus"):
            if getattr(h, name) is None:
                raise InvalidFieldError(f"hardware.{name}", None, f"a model needs it; give --{name.replace('_', '-')}")
        assert h.gpu is not None
        assert h.train_gpus is not None
        assert h.rollout_gpus is not None
        shape, gpu = _find_shape(h.model), find_gpu(h.gpu)

        def of(engine_gpus: int, engines: int) -> Placement:
            assert h.train_gpus is not None
            overhead = 20.0 + 60.0 * (engine_gpus > 1) + 70.0 * shape.is_mixture
            return Placement(
                shape=shape,
                gpu=gpu,
                train_gpus=h.train_gpus,
                engine_gpus=engine_gpus,
                engines=engines,
                weights=h.weights,
                cache=h.cache,
                training=h.training,
                bandwidth_use=h.bandwidth_use,
                decode_use=h.decode_use,
                prefill_use=h.prefill_use,
                train_use=h.train_use or (0.15 if shape.is_mixture else 0.35),
                layer_overhead_us=overhead if h.layer_overhead_us is None else h.layer_overhead_us,
                memory_fraction=h.memory_fraction,
                tokens_per_step=h.tokens_per_step,
                max_running=h.max_running,
                recompute=h.recompute,
                logprob_passes=h.logprob_passes,
                stream_gb_per_s=h.stream_gb_per_s,
                update_gb_per_s=h.update_gb_per_s,
            )

        size = h.engine_gpus or 1
        while (
            h.engine_gpus is None and 1.25 * of(size, 1).weight_bytes > size * gpu.memory_gb * 1e9 * h.memory_fraction
        ):
            size *= 2
        if h.rollout_gpus % size:
            raise InvalidFieldError(
                "hardware.rollout_gpus", h.rollout_gpus, f"an engine takes {size} GPUs; give a multiple of that"
            )
        return of(size, h.rollout_gpus // size)

    def engine_rates(self, placement: Placement | None) -> tuple[EngineRates, int]:
        """Rates of one engine, and how many there are.

        Raises:
            InvalidFieldError: neither a model nor a rate is given.
        """
        given = {k: v for k, v in self.engine if v is not None and k != "replicas"}
        if placement is None:
            if not {"base_s", "per_sequence_s"} & set(given):
                raise InvalidFieldError(
                    "hardware.model",
                    None,
                    "give --model NAME with --gpu, --train-gpus and --rollout-gpus, or --preset NAME, or --from RUN, "
                    "or measured rates (engine.base_s and trainer.fixed_s)",
                )
            return EngineRates(**given), self.engine.replicas or 1
        derived = placement.engine_rates()
        values = {name: getattr(derived, name) for name in EngineRates.__dataclass_fields__} | given
        return EngineRates(**values), self.engine.replicas or placement.engines

    def processes(self) -> tuple[str, ...]:
        """How trainer ranks and rollout workers count, in words."""
        t, p = self.trainer, self.pipeline
        said: list[str] = []
        if t.ranks is not None and t.ranks != t.measured_ranks:
            said.append(
                f"{t.ranks} trainer rank(s) instead of {t.measured_ranks}: a token of the batch takes "
                f"{t.measured_ranks / t.ranks:.3g} times as long; what they tell each other counts as nothing more"
            )
        if p.handling_s:
            said.append(f"{p.rollout_workers} process(es) make trajectories, {p.handling_s:.3g} s for each turn")
        else:
            said.append("processes that make trajectories take no time (pipeline.handling_s), however many they are")
        return tuple(said)

    def trainer_rates(self, placement: Placement | None) -> TrainerRates:
        """Rates of the trainer.

        Raises:
            InvalidFieldError: neither a model nor a rate is given, or ranks beside a model.
        """
        t = self.trainer
        given = {k: v for k, v in t if v is not None and k not in ("ranks", "measured_ranks")}
        if t.ranks is not None:
            if t.per_token_s is None:
                remedy = "they share the time for a token, so it has to be given (trainer.per_token_s, or --from RUN)"
                raise InvalidFieldError("trainer.ranks", t.ranks, f"{remedy}; a model's trainer has --train-gpus")
            given["per_token_s"] = t.per_token_s * t.measured_ranks / t.ranks
        if placement is None:
            if not {"fixed_s", "per_token_s"} & set(given):
                raise InvalidFieldError("trainer.fixed_s", None, "measured engine rates need a trainer's too; set it")
            return TrainerRates(**({"fixed_s": 0.0} | given))
        derived = placement.trainer_rates()
        values = {name: getattr(derived, name) for name in TrainerRates.__dataclass_fields__} | given
        return TrainerRates(**values)
