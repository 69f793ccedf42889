"""SGLang in a weight update. It has no transaction of its own: what arrives overwrites what serves.

    clean --begin--> open --bucket--> overwritten --bucket*--> complete --commit--> clean (new version)
      ^                |                   |                      |
      +---rollback-----+                   +------rollback--------+--> stays overwritten: refused, fenced

What it cannot do is not hidden from the transaction. Between the first bucket and the commit the engine's version is
a text that is no version; an overwritten engine refuses to go back and to be resumed, so the transaction fences it,
and only a complete update, or a restart, makes it serve again. SGLang compares no digests: once everything is in,
the checksums of its parameters are held against the trainer's and other engines', and the canary asks the policy.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import Engine, EngineError, MilesError, WeightManifest, WeightUpdateError
from miles_contracts.engine_proxy import EngineProxy
from miles_loop.sglang_checksums import ChecksumSource, TrainerChecks
from miles_loop.sglang_disk import SglangDiskEngine
from miles_rollout.engine_client import EngineClient
from miles_sync.messages import BroadcastBucket, HandleBucket, handle_name
from miles_sync.report import UpdateReport, WeightCheck
from miles_sync.update import UNACKNOWLEDGED

PARTIAL = "partial-"
"""Beginning of the version of an engine between two versions."""


class SglangFleet:
    """The SGLang engines of a run; remembers which of them are overwritten.

    Args:
        flush: forget cached prefixes with the last bucket of an update.
        trainer: says what checksums have to be; None holds those of engines against each other only.
        verify: False asks for no checksums at all.
    """

    def __init__(self, *, flush: bool, trainer: ChecksumSource | None = None, verify: bool = True) -> None:
        self.flush, self._verify = flush, verify
        self.trainer = TrainerChecks(trainer if verify else None)
        self._engines: dict[str, SglangEngine] = {}
        self._compared = ""
        self._first: dict[frozenset[str], tuple[str, dict[str, str]]] = {}

    async def ranks(self, client: EngineClient) -> int:
        """Receivers that an engine is: its tensor-parallel ranks.

        Raises:
            WeightUpdateError: it has ranks that SGLang cannot update over a group or by handle.
        """
        return _ranks(client, await client.server_info())

    async def handle_names(self, client: EngineClient) -> tuple[str, ...]:
        """By what the sender has to know an engine's ranks, to make handles for them.

        Raises:
            WeightUpdateError: as `ranks`.
        """
        info = await client.server_info()
        device = str(info.get("device") or "cpu")
        return tuple(handle_name(client.url, rank, device) for rank in range(_ranks(client, info)))

    def engine(self, client: EngineClient) -> SglangEngine:
        """The engine of this client, the same one every time."""
        return self._engines.setdefault(client.url, SglangEngine(client, self))

    async def compare(self, client: EngineClient, update_id: str) -> None:
        """Hold an engine's checksums against the trainer's, and those of the first engine asked in this update.

        Raises:
            WeightUpdateError: names the first tensor that differs.
        """
        if not self._verify:
            return
        found = await self.trainer.verify(client, update_id)
        if self._compared != update_id:
            self._compared, self._first = update_id, {}
        # Engines with another number of ranks name other parameters.
        other, expected = self._first.setdefault(frozenset(found), (client.url, found))
        for name in sorted(found):
            if found[name] != expected[name]:
                reason = f"checksum is {found[name]}, {expected[name]} on {other}"
                raise WeightUpdateError(reason, engine=client.url, tensor=name)


class SglangEngine(EngineProxy):
    """One SGLang server as an engine of the transaction."""

    def __init__(self, client: EngineClient, fleet: SglangFleet) -> None:
        super().__init__(client)
        self._client, self._fleet = client, fleet
        self._overwritten = False
        self._session = False
        self._open: tuple[str, WeightManifest] | None = None
        self._committed = ""

    @property
    def check(self) -> WeightCheck | None:
        """How far the update before was verified against the trainer's weights."""
        return self._fleet.trainer.checks.get(self.url)

    async def weight_version(self) -> int | None:
        """None for an engine between two versions."""
        return None if self._overwritten else await self._client.weight_version()

    async def resume(self) -> None:
        """Go on sampling.

        Raises:
            WeightUpdateError: its weights are a mixture.
        """
        if self._overwritten:
            reason = "SGLang's weights are partly those of an update that failed; it must not serve before a whole one"
            raise WeightUpdateError(reason, engine=self.url)
        await self._client.resume()

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Open a session; one that a failed update or a dead driver has left open is closed first."""
        if self._open is not None and self._open[0] == update_id:
            return
        try:
            await self._client.open_weight_update()
        except EngineError as error:
            if error.status is None or "already open" not in error.reason:
                raise
            await self._client.close_weight_update()
            await self._client.open_weight_update()
        self._session = True
        await self._fleet.trainer.expect(self._client, update_id)
        self._open = (update_id, manifest)

    async def load_bucket(self, bucket: Any) -> None:
        """Let SGLang load what the bucket's collective brings, or what its handles open."""
        assert isinstance(bucket, BroadcastBucket | HandleBucket)
        self._require(bucket.update_id)
        path, body = self._call_for(bucket)
        # Only a commit makes it a version: whoever asks meanwhile, also after this driver died, is told so.
        body["weight_version"] = PARTIAL + bucket.update_id
        body["flush_cache"] = self._fleet.flush and bucket.last
        self._overwritten = True
        what = f"bucket {bucket.index} of weight update {bucket.update_id}"
        try:
            await self._client.weight_call(path, body, what)
        except MilesError:
            if isinstance(bucket, BroadcastBucket):
                # Whoever does not take part must not keep the others waiting in the collective.
                with contextlib.suppress(MilesError):
                    await self._client.leave_weight_group(bucket.group)
            raise
        if bucket.last:
            await self._fleet.compare(self._client, bucket.update_id)

    def _call_for(self, bucket: BroadcastBucket | HandleBucket) -> tuple[str, dict[str, Any]]:
        if isinstance(bucket, BroadcastBucket):
            return "/update_weights_from_distributed", flattened(bucket)
        handles = bucket.handles_of(self.url)
        if not handles:
            raise WeightUpdateError(f"bucket {bucket.index} has no handle for it", engine=self.url)
        packed = [base64.b64encode(handle).decode() for handle in handles]
        return "/update_weights_from_tensor", {"serialized_named_tensors": packed, "load_format": "flattened_bucket"}

    async def commit_weight_update(self, update_id: str) -> None:
        """Close the session and give the weights their number. Committing the same update again changes nothing."""
        if self._committed == update_id:
            return
        manifest = self._require(update_id)
        await self._close_session()
        body = {"new_version": str(manifest.version), "abort_all_requests": False}
        await self._client.weight_call("/update_weight_version", body, f"version {manifest.version}")
        self._open, self._committed, self._overwritten = None, update_id, False

    async def rollback_weight_update(self, update_id: str) -> None:
        """Close the session.

        Raises:
            WeightUpdateError: tensors of the update are in already, or it is committed.
        """
        if self._open is None or self._open[0] == update_id:
            # Without an open update there may be a session whose beginning failed after that.
            self._open = None
            await self._close_session()
        if self._overwritten or self._committed == update_id:
            raise WeightUpdateError("SGLang cannot go back: the old weights are overwritten", engine=self.url)

    async def _close_session(self) -> None:
        """Once, also when what comes after it is repeated."""
        if self._session:
            await self._client.close_weight_update()
            self._session = False

    def _require(self, update_id: str) -> WeightManifest:
        if self._open is None or self._open[0] != update_id:
            raise WeightUpdateError(f"update {update_id} was not begun here", engine=self.url)
        return self._open[1]


def _ranks(client: EngineClient, info: Mapping[str, Any]) -> int:
    for name in ("dp_size", "pp_size"):
        if int(info.get(name) or 1) > 1:
            reason = f"SGLang updates no {name} = {info[name]} over a group or by handle; start more engines instead"
            raise WeightUpdateError(reason, engine=client.url)
    return int(info.get("tp_size") or 1)


def buckets_in_flight(engines: Sequence[Engine]) -> int:
    """How many buckets may be announced at once: SGLang takes them as they come, every other engine in their order."""
    return 1 if any(isinstance(engine, SglangEngine) for engine in engines) else UNACKNOWLEDGED


def with_checks(report: UpdateReport, engines: Sequence[Engine]) -> UpdateReport:
    """The report of an update with what was verified of its SGLang engines."""
    checks = [engine.check for engine in engines if isinstance(engine, SglangEngine | SglangDiskEngine)]
    return msgspec.structs.replace(report, checks=tuple(check for check in checks if check is not None))


def flattened(bucket: BroadcastBucket) -> dict[str, Any]:
    """SGLang's part of the call that announces a bucket."""
    specs = [placed.spec for placed in bucket.tensors]
    return {
        "group_name": bucket.group,
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "load_format": "flattened_bucket",
    }
