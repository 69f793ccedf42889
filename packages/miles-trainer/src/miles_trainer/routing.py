"""Routing of one optimiser step: replay, load-balancing loss and metrics; does nothing for dense models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from miles_trainer.batching import MicroBatch, TrainBatch
from miles_trainer.modeling import PolicyModel
from miles_trainer.ranks import Ranks
from miles_trainer.replay import Replayer, RouteUse


class RoutingStep:
    """What the routers do in one step.

    Args:
        policy: the model.
        replayer: its routers, None for a dense model.
        batch: this rank's part of the step.
        ranks: with which the step is made.
        replay: replay recorded choices; otherwise routers are only observed.
        aux_coefficient: weight of the load-balancing loss.

    Raises:
        RankFailedError, RankLostError: of another rank, where a load-balancing loss needs the step's counts.
    """

    def __init__(
        self,
        policy: PolicyModel,
        replayer: Replayer | None,
        batch: TrainBatch,
        ranks: Ranks,
        *,
        replay: bool,
        aux_coefficient: float,
    ) -> None:
        self.policy = policy
        self.ranks = ranks
        self.replayer = replayer
        self.replay = replay
        self.aux_coefficient = aux_coefficient
        self.num_tokens = sum(m.num_tokens for m in batch.micro_batches)
        """Fed tokens: of this rank, of the step once they were needed or `finish` was called."""
        self.agreement = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.aux = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.num_replayed = 0
        self.seconds = 0.0
        """Host time that replay added: placing the recorded choices, taking them over, comparing them."""
        traces = [t.routing for m in batch.micro_batches for t in m.trajectories if t.routing is not None]
        self.num_bytes = sum(trace.num_bytes for trace in traces)
        self.packed_bytes = sum(trace.packed_bytes for trace in traces)
        self.counts: Tensor | None = None
        self._whole = False
        if replayer is not None and aux_coefficient:
            with ranks.alone("the choices of experts"):
                mine = replayer.recorded_counts(batch.micro_batches) if replay else self._observe(replayer, batch)
            self.counts = ranks.total(mine)
            self._count_tokens()

    def _count_tokens(self) -> None:
        """Of the whole step, once."""
        if not self._whole:
            self.num_tokens = int(self.ranks.total(torch.tensor(self.num_tokens)))
            self._whole = True

    def _observe(self, replayer: Replayer, batch: TrainBatch) -> Tensor:
        """Choices by a pass without gradient: the aux loss needs those of the whole step before the first backward."""
        total = replayer.recorded_counts(()).to(self.policy.device)  # of nothing
        for micro in batch.micro_batches:
            with self.replayed(micro) as use, torch.no_grad():
                self.policy.forward(micro)
            if use is not None:
                total = total + replayer.used_counts(use)
        return total

    @contextmanager
    def replayed(self, micro: MicroBatch) -> Iterator[RouteUse | None]:
        """Hold for the forward and backward pass of one micro-batch."""
        if self.replayer is None or not (self.replay or self.aux_coefficient):
            yield None
            return
        rows, num_rows = self.policy.input_rows(micro)
        use = self.replayer.prepare(micro, rows, num_rows, replay=self.replay)
        with self.replayer.using(use):
            yield use
        self.seconds += use.seconds  # the backward pass is over: a recomputation is in it

    def add(self, use: RouteUse | None) -> Tensor | None:
        """Count a micro-batch after its forward pass; its share of the weighted aux loss, None without one."""
        if use is None or self.replayer is None:
            return None
        self.agreement += use.agreement
        self.num_replayed += use.replayed
        if self.counts is None:
            return None
        share = self.replayer.aux_loss(use, self.counts, self.num_tokens)
        self.aux += share.detach()
        return self.aux_coefficient * share

    def finish(self) -> None:
        """All ranks have added their micro-batches: from now on everything here is of the whole step."""
        self._count_tokens()
        if self.replayer is None:
            return
        counted = [self.num_replayed, self.num_bytes, self.packed_bytes]
        parts = torch.tensor(counted, dtype=torch.float64, device=self.aux.device)
        total = self.ranks.total(torch.cat([parts, torch.stack([self.agreement, self.aux])]))
        self.num_replayed, self.num_bytes, self.packed_bytes = (int(n) for n in total[:3].tolist())
        self.agreement, self.aux = total[3], total[4]

    def metrics(self) -> dict[str, float]:
        """After `finish`, what applies of: router_agreement, replayed_fraction, routing_bytes (in memory),
        routing_packed_bytes (on the wire) and aux_loss."""
        out: dict[str, float] = {}
        if self.replayer is None:
            return out
        layers = sum(r.replayable for r in self.replayer.routers)
        if self.replay and layers:
            out["router_agreement"] = float(self.agreement) / max(self.num_replayed, 1)
            out["routing_bytes"] = float(self.num_bytes)
            out["routing_packed_bytes"] = float(self.packed_bytes)
        if layers:
            out["replayed_fraction"] = self.num_replayed / (layers * self.num_tokens)
        if self.counts is not None:
            out["aux_loss"] = float(self.aux)
        return out
