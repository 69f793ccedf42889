"""A fleet of engines in memory, and a trainer that sends to it: real buckets, no processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from miles_contracts import (
    EngineError,
    GenerateResult,
    PauseMode,
    SamplingParams,
    ShmBucket,
    WeightManifest,
    WeightUpdateError,
)
from miles_sync import LocalReceiver, LocalSender
from miles_sync.tensors import spec_of

Hook = Callable[[str], Awaitable[None] | None]


def random_weights(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """A small model of several dtypes with odd sizes, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weights = {
        "model.embed_tokens.weight": rand(97 * scale, 33),
        "model.layers.0.self_attn.q_proj.weight": rand(31, 33).to(torch.bfloat16),
        "model.layers.0.mlp.experts.gate_up_proj": rand(4, 6, 5).to(torch.bfloat16),
        "model.layers.0.mlp.gate.weight": rand(4, 33),
        "model.norm.weight": rand(33),
        "model.scale": rand(1)[0],
        "model.empty": torch.empty(0, 3),
        "model.mask": rand(17) > 0,
        "model.fp8": rand(9, 7).to(torch.float8_e4m3fn),
    }
    return dict(sorted(weights.items()))


def manifest_of(weights: dict[str, torch.Tensor], version: int) -> WeightManifest:
    return WeightManifest(version=version, tensors=tuple(spec_of(n, weights[n]) for n in sorted(weights)))


class MemoryEngine:
    """A `miles_contracts.Engine` without a server: what it serves is the receiver's committed tensors.

    `calls` records what was asked; `hook` runs before each call and may raise or wait.
    """

    def __init__(self, url: str, version: int | None = 0, hook: Hook | None = None) -> None:
        self.url = url
        self.receiver = LocalReceiver()
        self.receiver.version = version
        self.paused = False
        self.calls: list[str] = []
        self.hook = hook

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.hook is not None:
            waiting = self.hook(what)
            if waiting is not None:
                await waiting

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        raise NotImplementedError

    async def abort(self, request_id: str | None = None) -> None:
        raise NotImplementedError

    async def flush_cache(self) -> None:
        raise NotImplementedError

    async def load_from_disk(self, path: Path, version: int) -> None:
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        await self._called("pause")
        self.paused = True

    async def resume(self) -> None:
        await self._called("resume")
        self.paused = False

    async def weight_version(self) -> int | None:
        await self._called("version")
        return self.receiver.version

    async def healthy(self) -> bool:
        return True

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        await self._called("begin")
        self.receiver.begin(update_id, manifest)

    async def load_bucket(self, bucket: ShmBucket) -> None:
        await self._called(f"load {bucket.index}")
        try:
            self.receiver.load(bucket)
        except WeightUpdateError as error:
            raise WeightUpdateError(error.reason, engine=self.url, tensor=error.tensor) from error

    async def commit_weight_update(self, update_id: str) -> None:
        await self._called("commit")
        self.receiver.commit(update_id)

    async def rollback_weight_update(self, update_id: str) -> None:
        await self._called("rollback")
        self.receiver.rollback(update_id)


class MemorySource:
    """A trainer in this process; `transfers` counts the most segments that were live at once."""

    def __init__(self, sender: LocalSender, weights: dict[str, torch.Tensor]) -> None:
        self.sender = sender
        self.weights = weights
        self.released: list[str] = []
        self.acknowledged: list[int] = []
        self.sent: list[int] = []
        self.most_live = 0
        self._count = 0
        self._manifest: WeightManifest | None = None

    async def begin(self, version: int) -> tuple[str, WeightManifest]:
        self._count += 1
        self._manifest = manifest_of(self.weights, version)
        return f"update-{version}-{self._count}", self._manifest

    async def buckets(self, update_id: str) -> AsyncIterator[ShmBucket]:
        assert self._manifest is not None
        for bucket in self.sender.send(self.weights.items(), self._manifest, update_id):
            self.sent.append(bucket.index)
            self.most_live = max(self.most_live, len(self.sent) - len(self.acknowledged))
            yield bucket

    async def acknowledge(self, update_id: str, index: int) -> None:
        self.acknowledged.append(index)
        self.sender.acknowledge(update_id, index)

    async def release(self, update_id: str) -> None:
        self.released.append(update_id)
        self.sender.release(update_id)


def refuse(reason: str, status: int = 400) -> Any:
    """A hook action: the engine answers that it does not."""

    def act(url: str) -> None:
        raise EngineError(url, reason, status)

    return act


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )
