"""Runs the model on a step's chunks: on KV slots when the model allows it, else with its own cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from miles_rollout.engine.attention import SlotPools, Step, active
from miles_rollout.engine.routes import RouteRecorder
from miles_rollout.engine.scheduler import Chunk
from miles_rollout.engine.slots import SlotTable


@dataclass(slots=True)
class StepLogits:
    """Logits that a step was asked for.

    Attributes:
        logits: [rows, vocabulary].
        sampling: (chunk, row) for every chunk that samples.
        prompt: (chunk, first position fed whose logits are there, first row, rows) for prompt log-probs.
    """

    logits: torch.Tensor
    sampling: list[tuple[Chunk, int]]
    prompt: list[tuple[Chunk, int, int, int]]


_NO_LOGITS = torch.empty(0)


class Executor(Protocol):
    """Computes chunks."""

    def run(self, chunks: list[Chunk]) -> StepLogits: ...


def wanted_rows(chunk: Chunk) -> tuple[int, bool]:
    """First position of the chunk whose logits are wanted, and whether any are (also when only sampling)."""
    sequence = chunk.sequence
    end = chunk.start + chunk.count
    if sequence.first_logprob >= 0:
        first = max(sequence.first_logprob, 1) - 1 + len(sequence.prompt_logprobs)
        if first < min(end, sequence.prompt_length - 1):
            return max(first, chunk.start), True
    return end - 1, chunk.samples


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Logits [rows, vocabulary] of flat token ids and positions [tokens]; rows None means all tokens."""


def transformers_forward(model: Any) -> Forward:
    """The model's own forward pass on one flat row."""

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        keep = 0 if rows is None else rows
        output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = output.logits[0]
        return logits

    return forward


class SlotExecutor:
    """The fast path: one forward pass for all chunks."""

    def __init__(
        self,
        forward: Forward,
        dtype: torch.dtype,
        pools: SlotPools,
        table: SlotTable,
        device: torch.device,
        routes: RouteRecorder | None,
    ) -> None:
        self._forward = forward
        self._pools = pools
        self._table = table.slots
        self._device = device
        self._dtype = dtype
        self._routes = routes

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> StepLogits:
        """Compute the chunks. Order inside the pass: by number of new tokens, then by context length."""
        chunks = sorted(chunks, key=lambda c: (c.count, c.start))
        starts = np.array([c.start for c in chunks])
        counts = np.array([c.count for c in chunks])
        rows = np.array([c.sequence.row for c in chunks])
        if counts[-1] == 1:
            ids = np.array([c.sequence.tokens[c.start] for c in chunks], dtype=np.int64)
            positions = starts
            write = self._table[rows, starts]
        else:
            ids = np.concatenate([c.sequence.tokens[c.start : c.start + c.count] for c in chunks]).astype(np.int64)
            positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
            write = np.concatenate([self._table[c.sequence.row, c.start : c.start + c.count] for c in chunks])
        step = Step(
            pools=self._pools,
            write=torch.from_numpy(write.astype(np.int64)).to(self._device),
            table=self._table,
            rows=rows,
            starts=starts,
            counts=counts,
            dtype=self._dtype,
        )
        keep, result = self._plan_logits(chunks)
        with active(step):
            result.logits = self._forward(
                torch.from_numpy(ids).to(self._device),
                torch.from_numpy(positions).to(self._device),
                None if keep is None else keep.to(self._device),
            )
        if self._routes is not None:
            self._routes.distribute(chunks)
        return result

    @staticmethod
    def _plan_logits(chunks: list[Chunk]) -> tuple[torch.Tensor | None, StepLogits]:
        """Which flat rows are wanted (None: all), and what for."""
        if chunks[-1].count == 1 and all(c.samples and c.sequence.first_logprob < 0 for c in chunks):
            return None, StepLogits(_NO_LOGITS, list(zip(chunks, range(len(chunks)), strict=True)), [])
        keep: list[int] = []
        result = StepLogits(_NO_LOGITS, [], [])
        at = 0
        for chunk in chunks:
            first, any_wanted = wanted_rows(chunk)
            if any_wanted:
                end = chunk.start + chunk.count
                if first < end - 1 or not chunk.samples:
                    result.prompt.append((chunk, first, len(keep), end - first))
                keep.extend(range(at + first - chunk.start, at + chunk.count))
                if chunk.samples:
                    result.sampling.append((chunk, len(keep) - 1))
            at += chunk.count
        return torch.tensor(keep, dtype=torch.int64), result


class NativeExecutor:
    """The slower path for models with state that slots cannot hold: each sequence has the model's own cache."""

    def __init__(self, model: Any, device: torch.device, routes: RouteRecorder | None) -> None:
        from transformers import DynamicCache

        new_cache: Any = DynamicCache
        self._model = model
        self._device = device
        self._routes = routes
        self._new_cache: Callable[[], Any] = partial(new_cache, config=model.config)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> StepLogits:
        """Compute the chunks one after the other."""
        result = StepLogits(_NO_LOGITS, [], [])
        kept: list[torch.Tensor] = []
        rows = 0
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            if chunk.start == 0:
                sequence.native_cache = self._new_cache()
            first, any_wanted = wanted_rows(chunk)
            ids = torch.from_numpy(sequence.tokens[chunk.start : end].astype(np.int64))[None].to(self._device)
            positions = torch.arange(chunk.start, end, device=self._device)[None]
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                cache=sequence.native_cache,
                use_cache=True,
                logits_to_keep=max(end - first, 1),
            )
            if self._routes is not None:
                self._routes.distribute([chunk])
            if any_wanted:
                kept.append(output.logits[0])
                if first < end - 1 or not chunk.samples:
                    result.prompt.append((chunk, first, rows, end - first))
                rows += end - first
                if chunk.samples:
                    result.sampling.append((chunk, rows - 1))
        if kept:
            result.logits = torch.cat(kept)
        return result
