"""The HTTP calls that change or show weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from miles_contracts import (
    Arrival,
    GroupRequest,
    InvalidFieldError,
    MilesError,
    ShmBucket,
    WeightGroupFactory,
    WeightManifest,
)
from miles_rollout.engine.core import EngineCore
from miles_rollout.engine.http import json_response, read_body
from miles_rollout.engine.weight_groups import WeightGroups

S = TypeVar("S")


class WeightRoutes:
    """Handlers of weight calls. Copying and hashing run in worker threads; only the swap is on the model thread.

    Args:
        factories: ways for weights to come besides `torch.distributed`, by the name of their backend.
    """

    def __init__(self, core: EngineCore, factories: Mapping[str, WeightGroupFactory]) -> None:
        self._core = core
        self._factories = factories
        self._joined: WeightGroups | None = None
        self._turn = asyncio.Lock()
        self._receiving: str | None = None
        self._verifying: tuple[str, asyncio.Task[None]] | None = None  # update id
        self._in_order = InOrder()

    def add_to(self, app: web.Application) -> None:
        """Register the calls."""
        add = app.router.add_post
        add("/begin_weight_update", self.begin)
        add("/update_weights_from_tensor", self.load_bucket)
        add("/update_weights_from_distributed", self.from_distributed)
        add("/end_weight_update", self.end)
        add("/init_weights_update_group", self.join_group)
        add("/destroy_weights_update_group", self.leave_group)
        app.on_cleanup.append(self._leave_all)
        add("/update_weights_from_disk", self.from_disk)
        add("/get_weights_by_name", self.by_name)
        add("/weights_checker", self.check)

    async def begin(self, request: web.Request) -> web.Response:
        """POST /begin_weight_update {update_id, manifest}."""
        body = await read_body(request)
        update_id = _text(body, "update_id")
        manifest = _convert(body, "manifest", WeightManifest)
        await asyncio.to_thread(self._core.updates.begin, update_id, manifest)
        self._in_order.begin(update_id)
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

    async def join_group(self, request: web.Request) -> web.Response:
        """POST /init_weights_update_group {master_address, master_port, rank_offset, world_size, group_name, backend}.

        The answer's `address` is what senders need to reach this engine, where the backend asks for that.
        """
        asked = _convert({"group": await read_body(request)}, "group", GroupRequest)
        address = await asyncio.to_thread(lambda: self._groups.join(asked))
        return json_response({"success": True, "message": f"joined group {asked.group_name}", "address": address})

    async def leave_group(self, request: web.Request) -> web.Response:
        """POST /destroy_weights_update_group {group_name}."""
        name = _text(await read_body(request), "group_name")
        if not await self._leave(name):
            raise InvalidFieldError("group_name", name, "this engine is not in such a group")
        return json_response({"success": True, "message": f"left group {name}"})

    async def from_distributed(self, request: web.Request) -> web.Response:
        """POST /update_weights_from_distributed {group_name, names, dtypes, shapes, load_format}, as SGLang has it.

        Our own fields: update_id, index, digests, and last, with which everything that came is verified before the
        answer; otherwise this transfer is verified while the next one is under way. The next one may be announced
        before this one has been answered: they take their turns by index, 0 first.
        """
        body = await read_body(request)
        update_id = _text(body, "update_id")
        index = body.get("index", 0)
        if type(index) is not int or index < 0:
            raise InvalidFieldError("index", index, "use an integer >= 0")
        await self._in_order.turn(update_id, index)
        # A caller that hangs up must not leave half a transfer behind: it goes on, and the group fails or not as one.
        await asyncio.shield(asyncio.create_task(self._receive(update_id, index, body)))
        return json_response({"success": True, "message": f"bucket {body.get('index', 0)} is here"})

    async def _receive(self, update_id: str, index: int, body: dict[str, Any]) -> None:
        async with self._turn:
            if self._in_order.is_over(update_id, index):
                return await self._verified(update_id)  # sent again
            updates, name = self._core.updates, body.get("group_name", "weight_update_group")
            self._receiving = name
            try:
                try:
                    updates.require_open(update_id)
                except MilesError:
                    # What the transfer before brought may be why it is not open any more.
                    await self._verified(update_id)
                    raise
                arrivals = await asyncio.to_thread(lambda: self._groups.receive(body))
                await self._verified(update_id)
            except BaseException:
                await self._leave(name)
                await asyncio.to_thread(updates.rollback, update_id)  # waits for what is being verified
                self._in_order.end(update_id)
                raise
            finally:
                self._receiving = None
            self._in_order.over(update_id, index)
            self._verifying = update_id, asyncio.create_task(self._verify(update_id, arrivals))
            if body.get("last", True):
                await self._verified(update_id)

    async def _verify(self, update_id: str, arrivals: Sequence[Arrival]) -> None:
        await asyncio.to_thread(self._core.updates.load_arrivals, update_id, arrivals)

    async def _verified(self, update_id: str) -> None:
        """Wait until what has come is verified."""
        if self._verifying is None:
            return
        (owner, task), self._verifying = self._verifying, None
        # What came after its update was rolled back is refused, which says nothing of the update after it.
        await (task if owner == update_id else asyncio.gather(task, return_exceptions=True))

    @property
    def _groups(self) -> WeightGroups:
        if self._joined is None:
            self._joined = WeightGroups(self._core.updates.layout.specs(), self._factories)
        return self._joined

    async def _leave(self, name: str) -> bool:
        return await asyncio.to_thread(lambda: self._groups.leave(name))

    async def _leave_all(self, _: web.Application) -> None:
        if self._joined is not None:
            await asyncio.to_thread(self._joined.close)

    async def end(self, request: web.Request) -> web.Response:
        """POST /end_weight_update {update_id, commit}."""
        body = await read_body(request)
        update_id = _text(body, "update_id")
        commit = body.get("commit", True)
        if not isinstance(commit, bool):
            raise InvalidFieldError("commit", commit, "use true or false")
        try:
            message = await (self._commit(update_id) if commit else self._roll_back(update_id))
        finally:
            # Not earlier: a transfer that waits for its turn would find the update open, and wait in its collective.
            self._in_order.end(update_id)
        version = self._core.weight_version
        return json_response({"success": True, "message": message, "weight_version": version})

    async def _commit(self, update_id: str) -> str:
        await self._verified(update_id)
        await self._on_model(lambda: self._core.commit_update(update_id))
        return "committed"

    async def _roll_back(self, update_id: str) -> str:
        # First of all, so that no transfer begins any more that nobody would end.
        await asyncio.to_thread(self._core.updates.rollback, update_id)
        if self._receiving is not None:
            # Whoever is in a transfer waits for the sender, which may never come.
            await self._leave(self._receiving)
        with contextlib.suppress(MilesError):
            await self._verified(update_id)
        return "rolled back"

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


class InOrder:
    """Lets the transfers of one update through by index, whatever order their announcements come in."""

    def __init__(self) -> None:
        self._update = ""
        self._next = 0
        self._changed = asyncio.Event()

    def begin(self, update_id: str) -> None:
        """The transfers of this update come next, from index 0."""
        if update_id != self._update:
            self._change(update_id, 0)

    def over(self, update_id: str, index: int) -> None:
        """This transfer is here."""
        if update_id == self._update:
            self._change(update_id, max(self._next, index + 1))

    def is_over(self, update_id: str, index: int) -> bool:
        """Whether this transfer is here."""
        return update_id == self._update and index < self._next

    def end(self, update_id: str) -> None:
        """No transfer of this update will come: whoever waits goes on, to be told so."""
        if update_id == self._update:
            self._change("", 0)

    async def turn(self, update_id: str, index: int) -> None:
        """Wait until every transfer before this one is here; not for an update that is not under way."""
        while update_id == self._update and index > self._next:
            await self._changed.wait()

    def _change(self, update_id: str, index: int) -> None:
        self._update, self._next = update_id, index
        self._changed.set()
        self._changed = asyncio.Event()


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
