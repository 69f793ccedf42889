"""Groups in, one optimiser update out: credit, normalisation and batching above a backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from miles_contracts import Group, InvalidFieldError, Trajectory, WeightManifest
from miles_trainer.advantages import Credit, assign_credit
from miles_trainer.backend import TorchBackend
from miles_trainer.batching import TrainBatch, build_micro_batch, plan, token_weights
from miles_trainer.config import ObjectiveKind, TrainerConfig
from miles_trainer.errors import describe
from miles_trainer.shares import Share, Step, divide

if TYPE_CHECKING:
    import torch

    from miles_trainer.ranks import Ranks

_LOG = logging.getLogger(__name__)


class Trainer:
    """Trains a causal LM from groups of trajectories.

    Args:
        model_path: Hugging Face folder of the policy; also the reference unless the configuration names one.
        config: objective, optimiser, batching.
        seed: of torch's generators.
        ranks: the trainer group that this process belongs to; None for a group of one. Every rank makes the same calls
            of `train_step`, or of `train` with its own share.

    Raises:
        InvalidFieldError: a model folder that cannot be loaded, or a setting the model does not allow.
    """

    def __init__(self, model_path: Path, config: TrainerConfig, *, seed: int, ranks: Ranks | None = None) -> None:
        self.config = config
        self.backend = TorchBackend(Path(model_path), config, seed=seed, ranks=ranks)
        self._warned = False

    @property
    def version(self) -> int:
        """Number of optimiser updates in the weights."""
        return self.backend.version

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of parts of the last step, by name; apart from the metrics, which equal runs have equal."""
        return self.backend.timings

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimiser update from `groups`; returns metrics (means over the step's trained tokens).

        Trajectories of members that failed or have no reward are left out and counted (`excluded`).

        Raises:
            NonFiniteError: NaN or infinity; model, optimiser and version are unchanged.
            InvalidFieldError: groups the estimator or the model cannot use, or nothing to train in them.
            RankFailedError, RankLostError: of another rank of the trainer group.
        """
        step = self.prepare(groups)
        return {**self.train(step.shares[self.backend.ranks.rank]), **step.metrics}

    def prepare(self, groups: Sequence[Group]) -> Step:
        """Give credit over all groups and divide them among the ranks; trains nothing.

        Raises:
            InvalidFieldError: as `train_step`.
        """
        credit = assign_credit(
            groups, self.config.advantage, rewarded=self.config.objective.kind is not ObjectiveKind.SFT
        )
        credit, unrouted = self._with_routes(credit)
        if not credit.trajectories:
            raise InvalidFieldError(
                "groups",
                f"{len(groups)} groups, {credit.excluded} trajectories excluded, {unrouted} without routes",
                "give at least one scored trajectory with a trained token",
            )
        self.backend.check(credit.trajectories)
        self._warn_of_truncated_sampling(credit)
        counts = np.array([t.num_trained for t in credit.trajectories], dtype=np.int64)
        metrics = {**_credit_metrics(credit, counts), "excluded_unrouted": float(unrouted)}
        return Step(shares=tuple(self._shares(credit, counts)), metrics=metrics)

    def train(self, share: Share) -> dict[str, float]:
        """This rank's part of one optimiser update; returns the metrics of the whole step that training gives.

        Raises:
            NonFiniteError, RankFailedError: model, optimiser and version are unchanged, on every rank.
            RankLostError, RanksDivergedError: the group is of no more use.
        """
        with self.backend.ranks.alone("its micro-batches"):
            batch = self._batch(share)
        return self.backend.train(batch)

    def _warn_of_truncated_sampling(self, credit: Credit) -> None:
        """Say once that sampling left out part of the distribution whose log-probs are trained."""
        if self._warned:
            return
        for t in credit.trajectories:
            how = t.sampling
            if how.top_p < 1 or how.top_k != -1 or how.min_p > 0:
                self._warned = True
                _LOG.warning(
                    "trajectories were sampled with top_p=%g, top_k=%d, min_p=%g: log-probs are of the whole "
                    "distribution, so the policy gradient is biased; sample with temperature only",
                    how.top_p,
                    how.top_k,
                    how.min_p,
                )
                return

    def _with_routes(self, credit: Credit) -> tuple[Credit, int]:
        """Refuse or leave out trajectories whose routing cannot be replayed; also how many were left out.

        A trajectory that is left out still counted in its group's baseline: its reward is as good as any.
        """
        complete = np.array(self.backend.has_routes(credit.trajectories), dtype=np.bool_)
        if complete.all():
            return credit, 0
        first = credit.trajectories[int(np.flatnonzero(~complete)[0])]
        if self.config.replay.incomplete == "refuse":
            raise InvalidFieldError(
                f"routing of {describe(first.identity)}",
                None if first.routing is None else first.routing.num_tokens,
                "replay needs the experts of every fed token: ask the engine for routes, "
                "set replay.incomplete to 'mask', or turn replay.enabled off",
            )
        kept = np.flatnonzero(complete)
        old, members = np.unique(credit.members[kept], return_inverse=True)
        return (
            replace(
                credit,
                trajectories=tuple(credit.trajectories[i] for i in kept),
                advantages=credit.advantages[kept],
                members=members,
                num_members=len(old),
            ),
            int((~complete).sum()),
        )

    def _shares(self, credit: Credit, counts: NDArray[np.int64]) -> Iterator[Share]:
        """Weights with the step's own denominators, then what belongs to each rank."""
        objective = self.config.objective
        weights = token_weights(
            counts, credit.members, credit.num_members, objective.aggregation, objective.aggregation_constant
        )
        for indices in divide(credit.trajectories, self.backend.ranks.size):
            yield Share(
                trajectories=tuple(credit.trajectories[i] for i in indices),
                advantages=credit.advantages[indices],
                weights=weights[indices],
                num_trained=int(counts.sum()),
                num_members=credit.num_members,
            )

    def _batch(self, share: Share) -> TrainBatch:
        trajectories = share.trajectories
        bins = plan(trajectories, self.config.batching.max_tokens, padded=self.backend.padded)
        micro = [
            build_micro_batch(
                [trajectories[i] for i in b], share.advantages[b], share.weights[b], share=self.backend.can_share
            )
            for b in bins
        ]
        return TrainBatch(micro_batches=tuple(micro), num_trained=share.num_trained, num_members=share.num_members)

    def score(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float32]]:
        """Log-probs (nats, sampling temperature applied) of each token: float32 [T], NaN at 0."""
        return self.backend.score(trajectories)

    def weight_manifest(self) -> WeightManifest:
        """Canonical names, dtypes and shapes of the present version, without digests."""
        return self.backend.weight_specs(self.version)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(canonical name, detached tensor) sorted by name; valid until the next step."""
        return self.backend.export_weights()

    def save(self, directory: Path) -> None:
        """Write a checkpoint into `directory` (new or empty), atomically; the model alone is in `directory/hf`."""
        self.backend.save(Path(directory))

    def load(self, directory: Path) -> None:
        """Continue exactly from a checkpoint (CheckpointError leaves everything as it was)."""
        self.backend.load(Path(directory))

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face folder, atomically."""
        self.backend.export_hf(Path(directory))

    def sleep(self) -> None:
        """Leave the accelerator until `wake`."""
        self.backend.sleep()

    def wake(self) -> None:
        """Return to the accelerator."""
        self.backend.wake()


def _credit_metrics(credit: Credit, counts: NDArray[np.int64]) -> dict[str, float]:
    rewards = credit.rewards
    return {
        "tokens": float(counts.sum()),
        "trajectories": float(len(credit.trajectories)),
        "members": float(credit.num_members),
        "excluded": float(credit.excluded),
        "excluded_groups": float(credit.excluded_groups),
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "advantage_abs": float(np.abs(credit.advantages).mean()),
    }
