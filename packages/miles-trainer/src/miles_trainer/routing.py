"""Routing of one optimiser step: replay, load-balancing loss and metrics; does nothing for dense models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from miles_trainer.batching import MicroBatch, TrainBatch
from miles_trainer.modeling import PolicyModel
from miles_trainer.replay import Replayer, RouteUse


class RoutingStep:
    """What the routers do in one step.

    Args:
        policy: the model.
        replayer: its routers, None for a dense model.
        batch: the step.
        replay: replay recorded choices; otherwise routers are only observed.
        aux_coefficient: weight of the load-balancing loss.
    """

    def __init__(
        self,
        policy: PolicyModel,
        replayer: Replayer | None,
        batch: TrainBatch,
        *,
        replay: bool,
        aux_coefficient: float,
    ) -> None:
        self.policy = policy
        self.replayer = replayer
        self.replay = replay
        self.aux_coefficient = aux_coefficient
        self.num_tokens = sum(m.num_tokens for m in batch.micro_batches)
        self.agreement = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.aux = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.num_replayed = 0
        self.seconds = 0.0
        """Host time that replay added: placing the recorded choices, taking them over, comparing them."""
        traces = [t.routing for m in batch.micro_batches for t in m.trajectories if t.routing is not None]
        self.num_bytes = sum(trace.num_bytes for trace in traces)
        self.packed_bytes = sum(trace.packed_bytes for trace in traces)
        self.counts: Tensor | None = None
        if replayer is not None and aux_coefficient:
            self.counts = replayer.recorded_counts(batch.micro_batches) if replay else self._observe(replayer, batch)

    def _observe(self, replayer: Replayer, batch: TrainBatch) -> Tensor:
        """Choices of the whole step by a pass without gradient: the aux loss needs them before the first backward."""
        total: Tensor | None = None
        for micro in batch.micro_batches:
            with self.replayed(micro) as use, torch.no_grad():
                self.policy.forward(micro)
            if use is not None:
                counts = replayer.used_counts(use)
                total = counts if total is None else total + counts
        if total is None:
            raise ValueError("a step has at least one micro-batch")
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

    def metrics(self) -> dict[str, float]:
        """What applies of router_agreement, replayed_fraction, routing_bytes (in memory), routing_packed_bytes (on
        the wire) and aux_loss."""
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
