"""The HTTP calls that change or show weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from miles_contracts import InvalidFieldError, ShmBucket, WeightManifest
from miles_rollout.engine.core import EngineCore
from miles_rollout.engine.http import json_response, read_body

S = TypeVar("S")


class WeightRoutes:
    """Handlers of weight calls. Copying and hashing run in worker threads; only the swap is on the model thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add_to(self, app: web.Application) -> None:
        """Register the calls."""
        add = app.router.add_post
        add("/begin_weight_update", self.begin)
        add("/update_weights_from_tensor", self.load_bucket)
        add("/end_weight_update", self.end)
        add("/update_weights_from_disk", self.from_disk)
        add("/get_weights_by_name", self.by_name)
        add("/weights_checker", self.check)

    async def begin(self, request: web.Request) -> web.Response:
        """POST /begin_weight_update {update_id, manifest}."""
        body = await read_body(request)
        update_id = _text(body, "update_id")
        manifest = _convert(body, "manifest", WeightManifest)
        await asyncio.to_thread(self._core.updates.begin, update_id, manifest)
        return json_response({"success": True, "message": f"update {update_id} is open", "update_id": update_id})

    async def load_bucket(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_tensor {load_format: miles_shm, bucket}."""
        body = await read_body(request)
        if body.get("load_format") != "miles_shm":
            remedy = "send load_format miles_shm with a shared-memory bucket; pickled tensors run code when read"
            raise InvalidFieldError("load_format", body.get("load_format"), remedy)
        bucket = _convert(body, "bucket", ShmBucket)
        await asyncio.to_thread(self._core.updates.load_bucket, bucket)
        return json_response({"success": True, "message": f"bucket {bucket.index} is staged"})

    async def end(self, request: web.Request) -> web.Response:
        """POST /end_weight_update {update_id, commit}."""
        body = await read_body(request)
        update_id = _text(body, "update_id")
        commit = body.get("commit", True)
        if not isinstance(commit, bool):
            raise InvalidFieldError("commit", commit, "use true or false")
        if commit:
            await self._on_model(lambda: self._core.commit_update(update_id))
            message = "committed"
        else:
            await asyncio.to_thread(self._core.updates.rollback, update_id)
            message = "rolled back"
        version = self._core.weight_version
        return json_response({"success": True, "message": message, "weight_version": version})

    async def from_disk(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_disk {model_path, weight_version}."""
        body = await read_body(request)
        folder = Path(_text(body, "model_path"))
        version = body.get("weight_version")
        if version is not None and not isinstance(version, str):
            raise InvalidFieldError("weight_version", version, "give a string")
        staged = await asyncio.to_thread(self._core.updates.stage_from_disk, folder)
        await self._on_model(lambda: self._core.swap_weights(staged, version or "default"))
        message = f"serving the weights of {folder}"
        return json_response({"success": True, "message": message, "weight_version": self._core.weight_version})

    async def by_name(self, request: web.Request) -> web.Response:
        """POST /get_weights_by_name {name, truncate_size}: the first rows of a tensor as nested lists."""
        body = await read_body(request)
        name, size = _text(body, "name"), body.get("truncate_size", 100)
        if type(size) is not int or size < 1:
            raise InvalidFieldError("truncate_size", size, "use an integer >= 1")
        layout = self._core.updates.layout
        tensor = layout.read(name)
        return json_response((tensor[:size] if tensor.ndim else tensor).float().cpu().tolist())

    async def check(self, request: web.Request) -> web.Response:
        """POST /weights_checker {action: checksum}: names, dtypes, shapes and digests of the serving weights."""
        body = await read_body(request)
        if body.get("action") != "checksum":
            raise InvalidFieldError("action", body.get("action"), "the embedded engine knows checksum")
        manifest = await asyncio.to_thread(self._core.updates.manifest, 0)
        return json_response(
            {
                "success": True,
                "message": f"{len(manifest.tensors)} tensors",
                "weight_version": self._core.weight_version,
                "tensors": manifest.tensors,
            }
        )

    async def _on_model(self, action: Any) -> Any:
        return await asyncio.wrap_future(self._core.post(action))


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidFieldError(name, value, "give a non-empty string")
    return value


def _convert(body: dict[str, Any], name: str, kind: type[S]) -> S:
    try:
        return msgspec.convert(body.get(name), kind)
    except (msgspec.ValidationError, InvalidFieldError) as error:
        raise InvalidFieldError(name, type(body.get(name)).__name__, f"not a {kind.__name__}: {error}") from error
