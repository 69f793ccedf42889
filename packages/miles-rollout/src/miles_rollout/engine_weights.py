"""The weight calls of an engine: Miles' transaction, and SGLang's own calls, which both engines answer.

begin -> load a bucket ... -> commit | rollback        the transaction, of the embedded engine
join a group -> open -> (collectives) -> close -> leave    SGLang's own, weights that come over a process group
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import EngineError, GroupRequest, ShmBucket, WeightManifest
from miles_rollout.engine_answers import mapping
from miles_rollout.engine_http import EngineHttp, require_success


class WeightCalls:
    """The part of `EngineClient` that changes weights.

    Args:
        http: connections to the engine.
        deadline_s: longest wait for one call.
    """

    def __init__(self, http: EngineHttp, deadline_s: float) -> None:
        self._http = http
        self._url = http.url
        self._weights_s = deadline_s

    async def begin_weight_update(self, update_id: str, manifest: WeightManifest) -> None:
        """Open an update transaction; the engine refuses a manifest that does not describe its model."""
        body = {"update_id": update_id, "manifest": msgspec.to_builtins(manifest)}
        await self._weights("/begin_weight_update", body, f"begin of weight update {update_id}")

    async def load_bucket(self, bucket: ShmBucket) -> None:
        """Let the engine copy one shared-memory bucket into its staged weights and verify the digests."""
        body = {"load_format": "miles_shm", "bucket": msgspec.to_builtins(bucket)}
        what = f"bucket {bucket.index} of weight update {bucket.update_id}"
        await self._weights("/update_weights_from_tensor", body, what)

    async def commit_weight_update(self, update_id: str) -> None:
        """Make the staged weights the serving ones; refused unless every tensor of the manifest is in."""
        body = {"update_id": update_id, "commit": True}
        await self._weights("/end_weight_update", body, f"commit of weight update {update_id}")

    async def rollback_weight_update(self, update_id: str) -> None:
        """Forget the staged weights; the old ones serve on. Harmless for an unknown or finished update."""
        body = {"update_id": update_id, "commit": False}
        await self._weights("/end_weight_update", body, f"rollback of weight update {update_id}")

    async def load_from_disk(self, path: Path, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder, all or nothing."""
        body = {"model_path": str(path), "weight_version": str(version)}
        await self._weights("/update_weights_from_disk", body, f"weights from {path}")

    # -- SGLang's own -------------------------------------------------------------------------------------------

    async def join_weight_group(self, request: GroupRequest) -> dict[str, Any]:
        """Enter a process group; answers when all of its ranks are in, the embedded engine with its `address`."""
        what = f"joining weight group {request.group_name}"
        return await self.weight_call("/init_weights_update_group", msgspec.to_builtins(request), what)

    async def leave_weight_group(self, name: str) -> None:
        """Leave a process group; refused for one that the engine is not in."""
        await self._weights("/destroy_weights_update_group", {"group_name": name}, f"leaving weight group {name}")

    async def open_weight_update(self) -> None:
        """Let SGLang take tensors; refused while an update is open."""
        await self._weights("/begin_weight_update", {}, "opening a weight update")

    async def close_weight_update(self) -> None:
        """Finish SGLang's open update; refused when none is open."""
        await self._weights("/end_weight_update", {}, "closing a weight update")

    async def weight_checksums(self) -> dict[str, str]:
        """A digest of every serving tensor by the engine's own name for it; engines hash in different ways.

        SGLang fuses some tensors (`qkv_proj`, `gate_up_proj`), and its ranks hold shards: a name is then
        followed by its rank.
        """
        answer = await self._weights("/weights_checker", {"action": "checksum"}, "the checksums of the weights")
        body = mapping(answer, self._url, "/weights_checker")
        if "tensors" in body:
            return {str(t["name"]): str(t["digest"]) for t in body["tensors"]}
        ranks = body.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise EngineError(self._url, "/weights_checker names neither tensors nor ranks")
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"{name}@{i}": digest for i, rank in enumerate(ranks) for name, digest in rank["checksums"].items()}

    async def weight_call(self, path: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        """A call of a weight update by its own name, for transports; `what` says in words what it is for."""
        return mapping(await self._weights(path, body, what), self._url, path)

    async def _weights(self, path: str, body: Mapping[str, Any], what: str) -> Any:
        answer = await self._http.call("POST", path, body, what, self._weights_s)
        require_success(self._url, answer)
        return answer
