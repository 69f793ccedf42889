"""The typed configuration of a run: every value a user may set, with its meaning, unit and default.

`RunConfig` composes the sections; the trainer's section is `miles_trainer`'s own. All models are frozen and
refuse unknown keys. Configuration objects stop at constructors: what runs gets plain values.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles_contracts import PauseMode
from miles_rollout.engine_identity import EngineDtype, EngineKind
from miles_rollout.order import TrainingOrder
from miles_rollout.router import RouterConfig
from miles_rollout.sglang_launch import SglangOptions
from miles_trainer.config import TrainerConfig

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
_LAST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=_LAST_PORT)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, docstrings become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
    """reasoning-gym: name of the task family, for example `basic_arithmetic`."""
    options: dict[str, Any] = {}
    """reasoning-gym: settings of the task family, for example `task.options.max_digits`."""
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
            raise ValueError("dataset: a reasoning_gym task needs task.dataset (the name of a task family)")
        return self


class SamplingConfig(Section):
    """How the policy's answers are sampled."""

    max_new_tokens: Positive = 128
    """Longest answer in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits before the softmax; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability; 1 is off."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""


class UnusedPrompts(StrEnum):
    """What happens to the prompt of a group that is not trained."""

    RETRY = "retry"
    DROP = "drop"


class Granularity(StrEnum):
    """When a group's share of the bounds in flight is free again."""

    SAMPLE = "sample"
    GROUP = "group"


class RolloutConfig(Section):
    """How groups of answers are made and when they are thrown away."""

    groups_per_step: Positive = 16
    """Groups (prompts) in one training batch."""
    group_size: Positive = 8
    """Answers sampled per prompt."""
    order: TrainingOrder = TrainingOrder.ARRIVAL
    """Order of training: finished groups of the oldest weights first (`arrival`), or strictly the order of the
    prompts (`prompt`): the same sequence in every run and across a resume as long as the same groups are dropped, but a
    slow group holds up later ones. Above depth 0 a filter such as `no_signal` drops by what was sampled: use `none`."""
    max_staleness: NonNegative | None = None
    """Oldest usable group, in optimiser updates behind the weights that will train on it; default: the pipeline
    depth + 1."""
    on_failure: UnusedPrompts = UnusedPrompts.RETRY
    """The prompt of a group whose generation or reward failed: sample it again (`retry`) or `drop` it (counted)."""
    on_stale: UnusedPrompts = UnusedPrompts.RETRY
    """The prompt of a group that grew too stale: sample it again (`retry`) or `drop` it (counted)."""
    max_attempts: Positive = 3
    """How often one prompt is tried before it is given up (and counted)."""
    replace_members: NonNegative = 0
    """Sample a failed answer of a group again this often before its whole group counts as failed."""
    filter: str = "no_signal"
    """`no_signal` drops groups whose rewards are all equal (they carry no gradient); `none` keeps all; or your
    function `pkg.mod:fn`, which takes a group and says whether to keep it."""
    max_in_flight: Positive | None = None
    """Most answers under way at the same time; default: what the pipeline depth admits."""
    max_tokens_in_flight: Positive | None = None
    """Most tokens (longest prompt and answer of each) under way at the same time; default: no bound."""
    granularity: Granularity = Granularity.SAMPLE
    """An answer frees its slot at once (`sample`), or all of a group's together when the last is done (`group`)."""
    buffer_groups: Positive | None = None
    """Most finished groups that wait for the trainer; default: 2 x `groups_per_step`."""
    buffer_mib: Positive = 1024
    """Most memory in MiB for finished groups that wait for the trainer."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; a longer one is refused with its position in the stream. Default: what the engine fits."""
    timeout_s: Seconds = 600.0
    """Deadline for one answer (or one agent episode), reward included."""
    reward_timeout_s: Seconds = 60.0
    """Deadline for scoring one answer."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training answers."""


class EvaluationSamplingConfig(SamplingConfig):
    """How evaluation's answers are sampled: greedily unless told otherwise."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Divides the logits before the softmax; 0 is greedy."""


class EvaluationMode(StrEnum):
    """Where held-out tasks are measured."""

    SHARED = "shared"
    DEDICATED = "dedicated"
    EXTERNAL = "external"


class EvaluationOverflow(StrEnum):
    """What happens when an evaluation is due and too many are outstanding."""

    BACKPRESSURE = "backpressure"
    SKIP = "skip"


class EvaluationConfig(Section):
    """When and how held-out tasks are measured."""

    mode: EvaluationMode = EvaluationMode.SHARED
    """`shared`: on the engines of the run, which make no new training answers meanwhile; `dedicated`: on engines of
    their own, beside training, from a snapshot; `external`: by the program `command`, beside training."""
    engines: Positive = 1
    """dedicated: number of engine processes."""
    urls: tuple[str, ...] = ()
    """dedicated: use these running engines and start none; they must see the run folder."""
    command: tuple[str, ...] = ()
    """external: program and arguments; `{checkpoint}` becomes the snapshot's folder, `{version}` its number. Its last
    line of output is a JSON object of numbers, recorded as `eval/<name>`."""
    max_outstanding: Positive = 2
    """dedicated, external: evaluations that may be waiting or running."""
    overflow: EvaluationOverflow = EvaluationOverflow.BACKPRESSURE
    """dedicated, external: when that many are outstanding, wait for one (`backpressure`) or `skip` the new one
    (never the last of a run)."""
    keep_snapshots: NonNegative = 0
    """dedicated, external: measured snapshots that stay in the run folder (the newest ones)."""
    timeout_s: Seconds = 3600.0
    """dedicated, external: deadline of one evaluation; a late one is a skipped point."""

    every: NonNegative = 0
    """Evaluate after every n optimiser steps; 0: only at start and end."""
    at_start: bool = True
    """Evaluate the untrained policy first."""
    at_end: bool = True
    """Evaluate the final policy."""
    samples: Positive = 1
    """Answers per held-out prompt."""
    ks: tuple[Positive, ...] = ()
    """The k of `pass@k` and `mean@k`, each at most `samples`; default: 1 and `samples`."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling of evaluation answers (greedy by default)."""

    @model_validator(mode="after")
    def _mode_is_complete(self) -> EvaluationConfig:
        if self.mode is EvaluationMode.EXTERNAL and not self.command:
            raise ValueError("command: mode external needs evaluation.command (the program that measures)")
        if self.command and self.mode is not EvaluationMode.EXTERNAL:
            raise ValueError("command: it is only used by mode external; set evaluation.mode, or leave it out")
        if self.command and not any("{checkpoint}" in part for part in self.command):
            raise ValueError("command: write {checkpoint} where the snapshot's folder belongs")
        if self.urls and self.mode is not EvaluationMode.DEDICATED:
            raise ValueError("urls: they are only used by mode dedicated; set evaluation.mode, or leave them out")
        if bad := [k for k in self.ks if k > self.samples]:
            raise ValueError(f"ks: {bad[0]} is more than evaluation.samples, {self.samples}")
        return self


class RouterKind(StrEnum):
    """What places turns on engines."""

    OWN = "own"
    SGLANG = "sglang"


class EngineConfig(Section):
    """The inference engines."""

    kind: EngineKind = EngineKind.EMBEDDED
    """What is started as an engine: the `embedded` engine, or `sglang` (installed, or see `engine.python`)."""
    replicas: Positive = 1
    """Number of engine processes."""
    urls: tuple[str, ...] = ()
    """Use these running engines (SGLang's native API) and start none."""
    host: str = "127.0.0.1"
    """Address the engines listen on."""
    port: Port = 0
    """First port; replica i uses port + i. 0: free ports are chosen."""
    threads: Positive = 1
    """CPU threads of one engine process."""
    dtype: EngineDtype = "float32"
    """Data type of the weights in the engine; `auto` takes the one in the model's config."""
    max_batch: Positive = 256
    """Most sequences sampled at the same time by one engine."""
    max_context: Positive | None = None
    """Longest sequence, prompt included; default: the model's own limit."""
    extra_args: tuple[str, ...] = ()
    """More command-line arguments for the engine."""
    python: str | None = None
    """Interpreter of the environment that the engines run in (SGLang often has one of its own); default: this one."""
    environment: dict[str, str] = {}
    """More environment variables for the engines, for example `engine.environment.CUDA_VISIBLE_DEVICES`."""
    sglang: SglangOptions = SglangOptions()
    """How an SGLang engine uses its hardware."""
    start_timeout_s: Seconds = 300.0
    """Deadline for an engine to become healthy."""
    restarts: NonNegative = 3
    """How often a dead engine is started again before the run ends."""
    hang_s: Seconds = 120.0
    """An engine that answers no health check for this long is killed and started again."""
    router: RouterKind = RouterKind.OWN
    """What places turns on engines: Miles' `own` router, or a `sglang` router process in front of them."""

    @model_validator(mode="after")
    def _ports_exist(self) -> EngineConfig:
        if self.port + self.replicas - 1 > _LAST_PORT:
            raise ValueError(f"port: {self.replicas} engines from this one on need ports above {_LAST_PORT}")
        return self


class TransportKind(StrEnum):
    """The way that weights take."""

    LOCAL = "local"
    BROADCAST = "broadcast"
    PEER = "peer"
    DISK = "disk"


class BroadcastBackend(StrEnum):
    """Communicators of the broadcast transport."""

    GLOO = "gloo"
    NCCL = "nccl"


class CanaryKind(StrEnum):
    """Whether a short prompt is sampled around every update, besides asking for versions."""

    OFF = "off"
    AGREE = "agree"
    CHANGE = "change"


class PeerBackendKind(StrEnum):
    """How bytes get into the memory of a peer."""

    TCP = "tcp"
    SHARED = "shared"
    NIXL = "nixl"


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: TransportKind = TransportKind.LOCAL
    """`local` (shared memory of one machine), `broadcast` (one group of the trainer and all engines; the one for SGLang
    and for engines on other machines), `peer` (one-sided writes into the memory of each engine) or `disk` (changed
    bytes through a shared folder)."""
    host: str = "127.0.0.1"
    """broadcast: address of the trainer's machine, as the engines' machines reach it."""
    backend: BroadcastBackend = BroadcastBackend.GLOO
    """broadcast: `gloo` (CPU) or `nccl` (trainer and engines on GPUs)."""
    peer_backend: PeerBackendKind = PeerBackendKind.TCP
    """peer: `tcp`, `shared` (one machine) or `nixl` (RDMA; needs `miles-sync[nixl]`)."""
    store: Path | None = None
    """disk: shared folder that versions are published in; default: `weights` in the run folder."""
    checkpoint_dir: Path | None = None
    """disk: local folder of the engines' machine for the patched checkpoint; default: `engine-weights` in the run
    folder."""
    mode: PauseMode = PauseMode.RETRACT
    """Requests that run while weights change: `retract` (recompute their cache), `in_place` or `abort`."""
    bucket_mib: Positive = 512
    """Size in MiB of the buckets that weights travel in."""
    directory: Path = Path("/dev/shm")
    """Shared-memory mount for the buckets."""
    deadline_s: Seconds = 300.0
    """Deadline of one weight update; a late update is rolled back."""
    canary: CanaryKind = CanaryKind.OFF
    """Probe the policy itself after an update, which is taken back when an engine answers wrongly: `agree` (finite and
    alike on all engines), `change` (and not what the engine answered before; for steps that always move weights).
    A probe queues like any request, so engines that are always full answer it late."""


class CheckpointConfig(Section):
    """When a run is saved."""

    every: NonNegative = 0
    """Checkpoint after every n optimiser steps; 0: only at the end and on a graceful stop."""
    keep: Positive = 2
    """How many checkpoints stay on disk (the newest ones)."""
    at_end: bool = True
    """Checkpoint the finished run."""


class RecordConfig(Section):
    """What a run writes down besides metrics."""

    trajectories: NonNegative = 4
    """Groups written to the run folder per step (wire frames); 0 writes none."""
    trajectories_mib: Positive = 256
    """Stop writing trajectories after this many MiB."""
    plot: bool = True
    """Draw the reward plot at the end."""


class RuntimeKind(StrEnum):
    """Where the processes of a run are."""

    LOCAL = "local"
    RAY = "ray"


class RayPlacement(StrEnum):
    """How trainer and engines are spread over a cluster's nodes."""

    PACK = "pack"
    SPREAD = "spread"
    STRICT_PACK = "strict_pack"
    STRICT_SPREAD = "strict_spread"


class RayConfig(Section):
    """The Ray cluster, and what each actor takes of it. Only used by `runtime.kind = "ray"`."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    address: str | None = None
    """Cluster to join: `host:port`, or `auto` for the one that this machine is part of. Default: `RAY_ADDRESS` (which
    `ray job submit` sets), else a cluster of this machine alone, which ends with the run."""
    placement: RayPlacement = RayPlacement.PACK
    """`pack` (few nodes, when they have room), `spread` (many), `strict_pack` (one node or none), `strict_spread` (a
    node for each)."""
    trainer_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each trainer rank's actor; default: `runtime.trainer_threads`."""
    trainer_gpus: NonNegative | None = None
    """GPUs of each trainer rank's actor; default: 1 when `trainer.device` is a GPU, or may be one and engines have
    GPUs."""
    trainer_resources: dict[str, float] = {}
    """Custom resources of each trainer rank's actor, for example `--runtime.ray.trainer_resources.big_memory 1`."""
    engine_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each engine's actor; default: `engine.threads`."""
    engine_gpus: NonNegative | None = None
    """GPUs of each engine's actor; default: as many as SGLang's parallelism spans, none for the embedded engine."""
    engine_resources: dict[str, float] = {}
    """Custom resources of each engine's actor."""
    rollout_cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs of each rollout worker's actor; default: 1."""
    rollout_resources: dict[str, float] = {}
    """Custom resources of each rollout worker's actor."""
    env: dict[str, str] = {}
    """Environment variables of the processes on the nodes, for example `--runtime.ray.env.NCCL_DEBUG INFO`."""
    placement_timeout_s: Seconds = 120.0
    """How long to wait until the cluster has room, at start and for an engine whose node was lost."""


class RuntimeConfig(Section):
    """The processes of a run."""

    kind: RuntimeKind = RuntimeKind.LOCAL
    """`local` (child processes on this machine) or `ray` (actors on the nodes of a Ray cluster)."""
    ray: RayConfig = RayConfig()
    trainer_ranks: Positive = 1
    """Processes that train together: each holds the whole model and trains its share of every batch (data parallel)."""
    trainer_rank_timeout_s: Seconds = 600.0
    """How long trainer ranks wait for one of them before all are started again from the newest checkpoint."""
    trainer_threads: Positive = 1
    """CPU threads of each trainer process."""
    trainer_restarts: NonNegative = 1
    """How often the run goes back to its newest checkpoint by itself when a trainer process dies or hangs."""
    rollout_workers: NonNegative | None = None
    """Processes that make answers (renderer, session server, agents, rewards and router); 0 makes them in the driver's
    own process. Default: 0 on this machine, 1 on a Ray cluster."""
    rollout_restarts: NonNegative = 3
    """How often each rollout worker that died is started again."""
    rollout_hang_s: Seconds = 120.0
    """A rollout worker that says nothing for this long is killed and started again."""
    step_timeout_s: Seconds = 3600.0
    """Deadline for one optimiser step, and for one batch of groups."""
    stop_timeout_s: Seconds = 10.0
    """Grace period for children to end before they are killed."""


class RunConfig(Section):
    """One run, complete: what `--dry-run` prints and the run folder stores as `config.toml`."""

    recipe: str = ""
    """Name of the recipe this run was made with."""
    hardware: str = "cpu"
    """Hardware target of the recipe."""
    model: str = ""
    """Name of a model of the recipe, or a folder with a Hugging Face model and tokenizer."""
    run_dir: Path | None = None
    """Run folder; default: `runs/<recipe>-<time>`."""
    steps: Positive = 100
    """Optimiser steps of the whole run."""
    seed: NonNegative = 0
    """Seed of everything random: weights of a fresh model, prompt order, sampling, dropout."""
    pipeline_depth: NonNegative = 1
    """Batches that rollout may run ahead of the trainer; 0 is synchronous."""
    task: TaskConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _answers_differ(self) -> RunConfig:
        rollout = self.rollout
        # An agent may choose its own sampling, and its tools may answer differently each time.
        if rollout.sampling.temperature == 0 and rollout.filter == "no_signal" and self.task.agent is None:
            raise ValueError(
                "rollout.sampling.temperature: greedy answers to one prompt are all equal, so rollout.filter = "
                "no_signal drops every group; use a value > 0, such as 1"
            )
        return self

    @property
    def rollout_workers(self) -> int:
        """Rollout worker processes, with their default resolved."""
        asked = self.runtime.rollout_workers
        return int(self.runtime.kind is RuntimeKind.RAY) if asked is None else asked

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> RunConfig:
        ranks, device = self.runtime.trainer_ranks, self.trainer.device
        if ranks > 1 and self.runtime.kind is RuntimeKind.LOCAL and device.startswith("cuda:"):
            raise ValueError(
                f"trainer.device: {ranks} trainer ranks cannot share {device}; use cuda, of which each takes its own"
            )
        return self

    @property
    def max_staleness(self) -> int:
        """Staleness limit in optimiser updates, with its default resolved."""
        return self.pipeline_depth + 1 if self.rollout.max_staleness is None else self.rollout.max_staleness

    @property
    def buffer_groups(self) -> int:
        """Capacity of the buffer in groups, with its default resolved."""
        return self.rollout.buffer_groups or 2 * self.rollout.groups_per_step
