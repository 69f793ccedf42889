"""An engine in front of another one: whoever wants to change one call overrides it, the rest passes through."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_contracts.protocols import Engine, GenerateResult, PauseMode, SamplingParams
from miles_contracts.weights import WeightManifest


class EngineProxy:
    """Passes every call on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def url(self) -> str:
        """Address of the engine."""
        return self._engine.url

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        """Sample."""
        return await self._engine.generate(
            input_ids, params, request_id=request_id, routing=routing, routing_start=routing_start
        )

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all."""
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._engine.resume()

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""
        await self._engine.flush_cache()

    async def weight_version(self) -> int | None:
        """Version that is served."""
        return await self._engine.weight_version()

    async def healthy(self) -> bool:
        """Whether it answers."""
        return await self._engine.healthy()

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update."""
        await self._engine.begin_weight_update(update_id, manifest)

    async def load_bucket(self, bucket: Any) -> None:
        """Take a bucket of an update."""
        await self._engine.load_bucket(bucket)

    async def commit_weight_update(self, update_id: str) -> None:
        """Serve the new weights."""
        await self._engine.commit_weight_update(update_id)

    async def rollback_weight_update(self, update_id: str) -> None:
        """Drop an update."""
        await self._engine.rollback_weight_update(update_id)

    async def load_from_disk(self, path: Path, version: int) -> None:
        """Load a checkpoint."""
        await self._engine.load_from_disk(path, version)
