"""SGLang's own calls for weights that come over a process group, which both engines answer.

join_weight_group        the engine's ranks enter a group whose rank 0 is the sender
open_weight_update       from here on tensors may come in
receive_weights          the engine enters one collective per tensor, in the order of the names
close_weight_update      the last tensor is in
leave_weight_group       the group is over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_contracts import EngineError, TensorSpec
from miles_rollout.engine_answers import mapping


class NativeWeightCalls:
    """The part of `EngineClient` that speaks SGLang's weight calls without Miles' additions."""

    _url: str

    async def _weights(self, path: str, body: Mapping[str, Any], what: str) -> Any:
        raise NotImplementedError

    async def join_weight_group(
        self, name: str, *, address: str, port: int, first_rank: int, world_size: int, backend: str = "gloo"
    ) -> None:
        """Enter a process group; answers when all of its `world_size` ranks are in.

        Args:
            name: of the group, unique on the engine.
            address, port: where the sender, rank 0, keeps the meeting point.
            first_rank: rank of the engine's first worker.
            world_size: ranks in the group, the sender included.
            backend: `gloo` or `nccl`.
        """
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._weights("/init_weights_update_group", body, f"joining weight group {name}")

    async def leave_weight_group(self, name: str) -> None:
        """Leave a process group; refused for one that the engine is not in."""
        await self._weights("/destroy_weights_update_group", {"group_name": name}, f"leaving weight group {name}")

    async def open_weight_update(self) -> None:
        """Let tensors come in; refused while an update is open."""
        await self._weights("/begin_weight_update", {}, "opening a weight update")

    async def receive_weights(
        self,
        group: str,
        tensors: Sequence[TensorSpec],
        *,
        update_id: str,
        flush_cache: bool = False,
        weight_version: int | None = None,
    ) -> None:
        """Receive these tensors from rank 0 of the group, one collective each, and load them; answers when all are in.

        Args:
            group: name of a group that the engine is in.
            tensors: what comes, in order. The embedded engine verifies digests; SGLang does not look at them.
            update_id: of the open update (an addition; SGLang has one at a time and no names for it).
            flush_cache: forget cached prefixes afterwards (SGLang refuses while requests run and are not retracted).
            weight_version: version that SGLang's weights have from now on; None keeps the present one.
        """
        body: dict[str, Any] = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "digests": [t.digest for t in tensors],
            "group_name": group,
            "update_id": update_id,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = str(weight_version)
        await self._weights("/update_weights_from_distributed", body, f"{len(tensors)} tensors over {group}")

    async def close_weight_update(self) -> None:
        """Finish an open update; refused when none is open."""
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
