"""SGLang in an update by disk: it loads a checkpoint that this host has verified, and says what it holds then.

It loads with the commit, so that is where a difference shows. An engine that holds something else than was sent has no
version and does not serve; the checkpoint before is still there, so when all engines refuse, all go back to it.
"""

from __future__ import annotations

from miles_contracts import WeightManifest, WeightUpdateError
from miles_loop.sglang_checksums import TrainerChecks
from miles_rollout.engine_client import EngineClient
from miles_sync.disk import DeltaSubscriber, DiskEngine
from miles_sync.report import WeightCheck


class SglangDiskEngine(DiskEngine):
    """One SGLang server that reloads from disk.

    Args:
        client: of the engine.
        subscriber: of the engine's host.
        checks: hold its checksums against the trainer's.
    """

    def __init__(self, client: EngineClient, subscriber: DeltaSubscriber, checks: TrainerChecks) -> None:
        super().__init__(client, subscriber)
        self._client, self._checks = client, checks
        self._condemned = ""  # the update with which it has loaded something else

    @property
    def check(self) -> WeightCheck | None:
        """How far the update before was verified against the trainer's weights."""
        return self._checks.checks.get(self.url)

    async def weight_version(self) -> int | None:
        """None for an engine that holds something else than was sent."""
        return None if self._condemned else await self._client.weight_version()

    async def resume(self) -> None:
        """Go on sampling.

        Raises:
            WeightUpdateError: it holds something else than was sent.
        """
        if self._condemned:
            reason = "SGLang has loaded something else than was sent; it must not serve before another update"
            raise WeightUpdateError(reason, engine=self.url)
        await self._client.resume()

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Note what is coming, and have the trainer ready to verify it."""
        await super().begin_weight_update(update_id, manifest)
        await self._checks.expect(self._client, update_id)

    async def commit_weight_update(self, update_id: str) -> None:
        """Let the engine load it, and hold what it has then against what was sent.

        Raises:
            WeightUpdateError: names the parameter that differs.
        """
        await super().commit_weight_update(update_id)
        self._condemned = update_id
        await self._checks.verify(self._client, update_id)
        self._condemned = ""

    async def rollback_weight_update(self, update_id: str) -> None:
        """Drop the update; after a commit, let the engine load the version before, if this host had one."""
        await super().rollback_weight_update(update_id)
        if self._condemned == update_id:
            self._condemned = ""
