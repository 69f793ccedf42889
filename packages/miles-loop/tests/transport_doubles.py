"""Engines and a trainer that write down what transports tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import EngineError, GroupRequest, PauseMode, TensorSpec, WeightManifest
from miles_rollout.engine_identity import EngineIdentity, EngineKind
from miles_sync.messages import GroupOffer
from miles_sync.sglang_layout import ChecksumTable, SglangForm

SPECS = tuple(TensorSpec(name=n, dtype="float32", shape=(2,), digest=f"xxh3_128:{n}") for n in "ab")
MANIFEST = WeightManifest(version=7, tensors=SPECS)


class Client:
    """An engine that writes down what it is told, and refuses what it is told to refuse."""

    def __init__(self, url: str, kind: EngineKind = EngineKind.EMBEDDED, **info: int) -> None:
        self.url = self.address = url
        self.kind, self.info = kind, info
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.refuse: dict[str, Exception] = {}
        self.checksums = {"w": "1"}
        self.version: str = "0"
        self.session = False

    def said(self, path: str) -> list[Mapping[str, Any]]:
        return [body for called, body in self.calls if called == path]

    async def identify(self) -> EngineIdentity:
        if "identify" in self.refuse:
            raise self.refuse["identify"]
        return EngineIdentity(kind=self.kind, version="0.5.23")

    async def server_info(self) -> dict[str, int]:
        return self.info

    async def weight_call(self, path: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        self.calls.append((path, body))
        if path in self.refuse:
            raise self.refuse[path]
        if path == "/update_weight_version":
            self.version = str(body["new_version"])
        elif "weight_version" in body:
            self.version = str(body["weight_version"])
        return {"success": True, "address": f"at {self.url}"}

    async def weight_version(self) -> int | None:
        return int(self.version) if self.version.isdigit() else None

    async def weight_checksums(self) -> dict[str, str]:
        return self.checksums

    async def join_weight_group(self, request: GroupRequest) -> dict[str, Any]:
        return await self.weight_call("/init_weights_update_group", msgspec.to_builtins(request), "joining")

    async def leave_weight_group(self, name: str) -> None:
        self.calls.append(("leave", {"group_name": name}))

    async def open_weight_update(self) -> None:
        if self.session:
            raise EngineError(self.url, "a weight-update session is already open; call end_weight_update() first", 400)
        self.session = True

    async def close_weight_update(self) -> None:
        if not self.session:
            raise EngineError(self.url, "no weight-update session is open", 400)
        self.session = False

    async def resume(self) -> None:
        self.calls.append(("resume", {}))

    async def pause(self, mode: PauseMode) -> None: ...


class Sender:
    """A trainer that writes down who receives."""

    def __init__(self) -> None:
        self.told: list[tuple[tuple[str, ...], bool]] = []
        self.table = ChecksumTable(nothing="this trainer hashes nothing")

    async def connect(self, receivers: Sequence[str], *, split: bool, digests: bool = True) -> GroupOffer:
        self.told.append((tuple(receivers), split))
        self.digests = digests
        group = f"g{len(self.told)}"
        return GroupOffer(group=group, host="trainer", port=5, size=len(receivers) + 1, backend="gloo", timeout_s=9)

    async def expect_checksums(self, update_id: str, form: SglangForm) -> None: ...

    async def checksums(self, update_id: str, form: SglangForm) -> ChecksumTable:
        return self.table


def sglang(url: str = "http://s", **info: int) -> Client:
    return Client(url, EngineKind.SGLANG, **info)


async def connected(transport: Any, *clients: Client) -> list[Any]:
    return list(await transport.connect(list(clients)))
