"""A start that takes long says what it waits for; one that does not stays quiet."""

from __future__ import annotations

import asyncio

from miles_loop.late import said_when_late


async def test_it_is_said_once_when_late() -> None:
    said: list[str] = []
    told = asyncio.Event()

    def note(text: str) -> None:
        said.append(text)
        told.set()

    async with said_when_late(note, "engine-0 is not ready yet", 0.01):
        await told.wait()
        await asyncio.sleep(0.05)
    assert said == ["engine-0 is not ready yet"]


async def test_it_is_not_said_in_time() -> None:
    said: list[str] = []
    async with said_when_late(said.append, "engine-0 is not ready yet", 0.01):
        pass
    await asyncio.sleep(0.05)
    assert said == []
