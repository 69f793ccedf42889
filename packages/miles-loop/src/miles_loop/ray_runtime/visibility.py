"""What every node has to see, asked of the node itself before anything runs there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_contracts import InvalidFieldError
from miles_loop.ray_runtime.supervisor import Place


async def require_visible(actor: Any, place: Place, paths: Mapping[str, Path]) -> None:
    """Refuse a node that does not see all paths.

    Args:
        actor: a supervisor on the node.
        place: where it is.
        paths: absolute paths by the name of the field that says where they are.

    Raises:
        InvalidFieldError: naming field, path and node.
    """
    missing = await actor.missing.remote([str(path) for path in paths.values()])
    for name, path in paths.items():
        if str(path) in missing:
            raise InvalidFieldError(
                name, str(path), f"{place} does not see it; put it on storage that every node of the cluster mounts"
            )


async def require_shared_memory(trainer: tuple[Any, Place], engine: tuple[Any, Place], directory: Path) -> None:
    """Refuse an engine that does not see the trainer's shared memory; its first weight update would fail.

    Args:
        trainer: supervisor of the trainer, and where it is.
        engine: supervisor of the engine, and where it is.
        directory: the shared-memory mount; a mark is made there and removed again.

    Raises:
        InvalidFieldError: naming both places and what to do.
    """
    (writer, there), (reader, here) = trainer, engine
    mark = str(directory / f".miles-{secrets.token_hex(8)}")
    await writer.leave_mark.remote(mark)
    try:
        missing = await reader.missing.remote([mark])
    finally:
        await writer.remove_mark.remote(mark)
    if missing:
        raise InvalidFieldError(
            "sync.transport",
            "local",
            f"an engine is on {here}, the trainer on {there}: weights that travel through shared memory cannot get "
            "there; use --sync.transport broadcast, peer or disk, or --runtime.ray.placement strict_pack",
        )
