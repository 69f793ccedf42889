"""The data-parallel backend: every rank holds the whole Hugging Face model and its AdamW, on CPU or one GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_contracts import InvalidFieldError, MilesError, TrainerBackend, Trajectory, WeightManifest
from miles_trainer import checkpoint
from miles_trainer.arena import into_arena
from miles_trainer.batching import MicroBatch, TrainBatch, build_micro_batch, check_trajectories, plan
from miles_trainer.config import ObjectiveKind, TrainerConfig
from miles_trainer.errors import NonFiniteError, NonFiniteReport, describe
from miles_trainer.export import Exporter
from miles_trainer.loss import StepSums, micro_batch_loss
from miles_trainer.modeling import PolicyModel, load_model
from miles_trainer.objectives import Tokens
from miles_trainer.optimizer import MasterAdamW
from miles_trainer.ranks import OneRank, Ranks, fingerprints
from miles_trainer.replay import Replayer, declared_experts, find_routers
from miles_trainer.routing import RoutingStep
from miles_trainer.schedule import factor

_LOG = logging.getLogger(__name__)


class TorchBackend:
    """Implements `miles_contracts.TrainerBackend` in one process, a group of its own or a rank of a larger one.

    What an update means (credit, weights, objective, packing) is decided by shared code; this class runs the
    forward and backward passes, the optimiser, and owns the tensors.

    Args:
        model_path: Hugging Face folder of the policy.
        config: the trainer's configuration.
        seed: of torch's generators.
        ranks: the trainer group that this process belongs to; None for a group of one.

    Raises:
        InvalidFieldError: a device that is not there, or a model folder that cannot be loaded.
    """

    def __init__(self, model_path: Path, config: TrainerConfig, *, seed: int, ranks: Ranks | None = None) -> None:
        self.config = config
        self.model_path = model_path
        self.ranks = OneRank() if ranks is None else ranks
        self.device = _device(config.device, self.ranks)
        self.ranks.use(self.device)
        self._seed = seed
        torch.manual_seed(seed)  # alike on all ranks: a model that is not complete on disk is completed at random
        self.version = 0
        self.timings: dict[str, float] = {}
        self._asleep = False
        self._reference: PolicyModel | None = None
        self._export: Exporter | None = None
        self._adopt(model_path)

    def _adopt(self, path: Path) -> None:
        """Load the model in `path` and a fresh optimiser for it; on failure the present ones stay."""
        model = load_model(path, self.config.dtype, self.device)
        into_arena(model)
        policy = self._wrap(model)
        if self.config.gradient_checkpointing:
            _checkpoint_activations(model)
        model.train()
        replayer = Replayer(model, policy.probe) if find_routers(model) else None
        experts = declared_experts(model.config)
        if replayer is None and experts and self.config.replay.enabled:
            remedy = f"no router for its {experts} experts was found, so nothing can be replayed; turn it off"
            raise InvalidFieldError("replay.enabled", True, remedy)
        if (replayer is not None or experts) and not self.config.replay.enabled:
            _LOG.warning(
                "replay.enabled is off for a mixture-of-experts model: the trainer chooses other experts than the "
                "engine did for some tokens, which shows as noise in importance ratios (train_rollout_kl)"
            )
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = MasterAdamW(parameters, self.config.optimizer)
        self.policy = policy
        self.replayer = replayer

    def _wrap(self, model: Any) -> PolicyModel:
        batching = self.config.batching
        return PolicyModel(model, packing=batching.packing, logits_bytes=batching.logits_bytes)

    @property
    def padded(self) -> bool:
        """Whether micro-batches are padded, which the planner has to know."""
        return self.policy.padded

    @property
    def can_share(self) -> bool:
        """Whether micro-batches may hold common prefixes once.

        A load-balancing loss counts every fed token, so there a prompt has to be fed as often as it occurs.
        """
        wanted = self.config.batching.share_prefixes and not self.config.replay.aux_loss_coefficient
        return wanted and self.policy.can_share

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Refuse trajectories this model cannot process (InvalidFieldError)."""
        check_trajectories(trajectories, self.policy.vocab_size, self.policy.max_length)

    @property
    def replaying(self) -> bool:
        """Whether trajectories need routing traces."""
        return self.replayer is not None and self.config.replay.enabled

    def has_routes(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """For each trajectory whether it carries a complete trace; all True when nothing is replayed.

        Raises:
            InvalidFieldError: a trace of another model.
        """
        if self.replayer is None or not self.config.replay.enabled:
            return [True] * len(trajectories)
        return [self.replayer.check(t) for t in trajectories]

    def learning_rate(self) -> float:
        """Rate of the next update."""
        return self.config.optimizer.lr * factor(self.version, self.config.optimizer.schedule)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimiser update of which `batch` is this rank's part; returns metrics of the whole step.

        Raises:
            NonFiniteError: NaN or infinity in a log-prob, the loss or a gradient; nothing was changed, on any rank.
            RankFailedError: another rank failed for another reason; nothing was changed, on any rank.
            RankLostError, RanksDivergedError: the group is of no more use.
        """
        self._require_awake()
        ranks = self.ranks
        ranks.restart_clock()
        self._seed_rank()
        sums = StepSums.zero(self.device)
        self.optimizer.zero_grad()
        try:
            routing = RoutingStep(
                self.policy,
                self.replayer,
                batch,
                ranks,
                replay=self.replaying,
                aux_coefficient=self.config.replay.aux_loss_coefficient,
            )
            with ranks.alone("its part of the step"):
                self._accumulate(batch, routing, sums)
            ranks.sum_gradients(self.optimizer.masters)
            lr = self.learning_rate()
            norm = self._update(lr, batch)
        finally:
            self.optimizer.zero_grad()
        if ranks.size > 1:
            ranks.compare(fingerprints(dict(self.policy.model.named_parameters())), "the weights")
        self.version += 1
        routing.finish()
        micro_batches = ranks.total(torch.tensor(len(batch.micro_batches)))
        self.timings = {"replay_s": routing.seconds} if self.replaying else {}
        if ranks.size > 1:
            self.timings |= {"rank_wait_s": ranks.wait_s, "reduce_s": ranks.reduce_s}
        metrics = sums.over(ranks).metrics(batch.num_trained, self.config.objective) | routing.metrics()
        fed = {"tokens_fed": float(routing.num_tokens), "micro_batches": float(micro_batches)}
        return {**metrics, "grad_norm": norm, "lr": lr, **fed}

    def _seed_rank(self) -> None:
        """Other ranks than the first draw from a stream that depends on nothing but the step, so any can resume."""
        if self.ranks.rank:
            sequence = np.random.SeedSequence([self._seed, self.version, self.ranks.rank])
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def _accumulate(self, batch: TrainBatch, routing: RoutingStep, sums: StepSums) -> None:
        """Forward and backward passes of this rank's micro-batches."""
        for micro in batch.micro_batches:
            with routing.replayed(micro) as use:
                loss = self._loss(micro, sums)
                aux = routing.add(use)
                # inside the block: a recomputation in the backward pass replays too
                (loss if aux is None else loss + aux).backward()  # type: ignore[no-untyped-call]

    def _update(self, lr: float, batch: TrainBatch) -> float:
        try:
            return self.optimizer.step(lr)
        except NonFiniteError as error:
            # Gradients are summed, so every rank is here.
            mine = "\n".join(describe(t.identity) for m in batch.micro_batches for t in m.trajectories)
            names = [name for told in self.ranks.texts(mine) for name in told.splitlines()]
            report = error.report
            raise NonFiniteError(
                NonFiniteReport(
                    what=report.what,
                    count=report.count,
                    value=report.value,
                    parameters=report.parameters,
                    candidates=tuple(names),
                )
            ) from None

    def _loss(self, micro: MicroBatch, sums: StepSums) -> Tensor:
        """This micro-batch's share of the step's loss."""
        objective = self.config.objective
        reference = self._reference_logprobs(micro)
        logprobs, entropies = self.policy.forward(
            micro,
            entropy=objective.entropy_metric or bool(objective.entropy_coefficient),
            entropy_gradient=bool(objective.entropy_coefficient),
        )
        _require_finite("logprob", logprobs, micro)
        engine = torch.from_numpy(micro.engine_logprobs).to(self.device, logprobs.dtype)
        if objective.kind is ObjectiveKind.SFT:
            engine = logprobs.detach()
        tokens = Tokens(
            engine=engine,
            advantages=torch.from_numpy(micro.advantages).to(self.device, logprobs.dtype),
            weights=torch.from_numpy(micro.weights).to(self.device),
            segments=torch.from_numpy(micro.segments).to(self.device),
            num_segments=len(micro.trajectories),
        )
        loss, weighted = micro_batch_loss(logprobs, entropies, reference, tokens, objective, sums)
        if not bool(torch.isfinite(loss.detach())):
            _require_finite("loss", weighted, micro)
        return loss

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        kl = self.config.objective.kl
        if not kl.coefficient and not kl.monitor:
            return None
        if self._reference is None:
            model = load_model(kl.reference_path or self.model_path, self.config.dtype, self.device)
            model.requires_grad_(False).eval()
            self._reference = self._wrap(model)
        with torch.no_grad():
            logprobs, _ = self._reference.forward(micro)
        _require_finite("reference_logprob", logprobs, micro)
        return logprobs

    def score(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-probs of every token given those before it: float32 [T] each, NaN at 0, sampling temperature applied."""
        self._require_awake()
        self.check(trajectories)
        out = [np.full(t.num_tokens, np.nan, dtype=np.float32) for t in trajectories]
        for indices in plan(trajectories, self.config.batching.max_tokens, padded=self.padded):
            micro = build_micro_batch([trajectories[i] for i in indices], share=self.can_share)
            if not len(micro.targets):
                continue
            with torch.no_grad(), self._replayed(micro):
                logprobs, _ = self.policy.forward(micro)
            values = logprobs.float().cpu().numpy()
            ends = np.cumsum(np.bincount(micro.segments, minlength=len(indices)))
            for index, part in zip(indices, np.split(values, ends[:-1]), strict=True):
                out[index][1:] = part
        return out

    @contextmanager
    def _replayed(self, micro: MicroBatch) -> Iterator[None]:
        """Replay where every trajectory has a complete trace, else the model's own routing."""
        if self.replayer is None or not self.replaying or not all(self.has_routes(micro.trajectories)):
            yield
            return
        rows, num_rows = self.policy.input_rows(micro)
        with self.replayer.using(self.replayer.prepare(micro, rows, num_rows, replay=True)):
            yield

    def weight_specs(self, version: int) -> WeightManifest:
        """Manifest of the weights under canonical names, from metadata only."""
        return self._exporter().manifest(version)

    def _exporter(self) -> Exporter:
        if self._export is None or self._export.model is not self.policy.model:
            self._export = Exporter(self.policy.model)
        return self._export

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Canonical names and detached tensors, sorted by name; nothing larger than one fused tensor is copied."""
        self._require_awake()
        return self._exporter().stream()

    def save(self, directory: Path) -> None:
        """Write a checkpoint, atomically (see `checkpoint`)."""
        checkpoint.save(directory, self.policy.model, self.optimizer, self.version, self.model_path)

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face folder, atomically."""
        checkpoint.export_hf(directory, self.policy.model, self.model_path)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint; on any error the present state stays.

        Raises:
            CheckpointError: incomplete, corrupted, or of another model.
        """
        saved = checkpoint.read(directory, self.policy.model)
        before = self.policy, self.optimizer, self.replayer
        try:
            self._adopt(directory / checkpoint.HF)
            checkpoint.restore_optimizer(saved, self.optimizer)
        except BaseException:
            self.policy, self.optimizer, self.replayer = before
            raise
        checkpoint.restore_rng(saved)
        self.version = saved.version

    def sleep(self) -> None:
        """Give up the accelerator: weights and optimiser state move to host memory, gradients are dropped."""
        if self._asleep:
            return
        self._move(torch.device("cpu"))
        self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep:
            self._move(self.device)
            self._asleep = False

    def _move(self, device: torch.device) -> None:
        self.optimizer.zero_grad()
        if self.device.type == "cpu":
            return
        self.policy.model.to(device)
        self.optimizer.to(device)
        if self._reference is not None:
            self._reference.model.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def _require_awake(self) -> None:
        if self._asleep:
            raise MilesError("the trainer sleeps; call wake() first")


def _checkpoint_activations(model: Any) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InvalidFieldError("gradient_checkpointing", True, f"{type(model).__name__} cannot do it; turn it off")
    # renamed in transformers 5.2x; the first positional argument is the same
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _device(name: str, ranks: Ranks) -> torch.device:
    """The device of this name; `auto` is cuda when there is one, else cpu. Of several GPUs each rank takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks.size > 1 and torch.cuda.device_count() > 1:
        name = f"cuda:{ranks.rank}"
    with ranks.alone("its device"):
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # unknown, not built in, or not there
            reason = str(error).partition("\n")[0]
            raise InvalidFieldError("trainer.device", name, f"use auto or cpu; torch says: {reason}") from error
    if device.type == "cuda" and ranks.size > 1:
        unit = str(torch.cuda.get_device_properties(device).uuid)
        if len(set(ranks.texts(unit))) < ranks.size:
            raise InvalidFieldError("trainer.device", name, "several trainer ranks would share a GPU; use fewer ranks")
    return device


def _require_finite(what: str, values: Tensor, micro: MicroBatch) -> None:
    values = values.detach()
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    bad = torch.nonzero(~finite).flatten().cpu().numpy()
    first = int(bad[0])
    raise NonFiniteError(
        NonFiniteReport(
            what=what,
            count=len(bad),
            value=str(float(values[first])),
            identity=micro.trajectories[int(micro.segments[first])].identity,
            token=int(micro.target_index[first]),
        )
    )


if TYPE_CHECKING:

    def _conforms(backend: TorchBackend) -> TrainerBackend:
        return backend
