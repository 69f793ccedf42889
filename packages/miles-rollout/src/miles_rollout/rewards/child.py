"""A few child processes that answer one JSON line per question, and are replaced when they die or are too slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from miles_contracts import DeadlineExceededError, InvalidFieldError, MilesError

_LINE_LIMIT = 16 * 2**20


class ChildDiedError(MilesError):
    """A child process ended, or said something that is not an answer."""


class ChildPool:
    """Asks child processes, each one question at a time.

    Args:
        command: starts a child; it reads a JSON object a line and writes a JSON object a line.
        processes: how many at most; started when first needed.
        timeout_s: seconds for one answer, the child's start included.
    """

    def __init__(self, command: Sequence[str], *, processes: int, timeout_s: float) -> None:
        if processes < 1:
            raise InvalidFieldError("processes", processes, "use at least one")
        if not timeout_s > 0:
            raise InvalidFieldError("timeout_s", timeout_s, "use a time > 0")
        self._command = tuple(command)
        self._timeout = timeout_s
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `question`; the time waiting for a free child does not count.

        Raises:
            DeadlineExceededError: no answer in time; the child was killed.
            ChildDiedError: the child ended or answered nonsense.
        """
        async with self._slots:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._exchange(child, question)
            except TimeoutError as error:
                await self._kill(child)
                raise DeadlineExceededError(
                    f"an answer of {self._command[-1]}", self._timeout, "raise the reward's timeout_s"
                ) from error
            except BaseException:
                await self._kill(child)
                raise
            self._idle.append(child)
            return answer

    async def close(self) -> None:
        """Kill the children."""
        idle, self._idle = self._idle, []
        for child in idle:
            await self._kill(child)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_LIMIT,
        )

    async def _exchange(self, child: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(question) + b"\n")
            await child.stdin.drain()
            return msgspec.json.decode(await child.stdout.readline(), type=dict[str, Any])
        except (ConnectionError, msgspec.MsgspecError) as error:
            raise ChildDiedError(f"{self._command[-1]} ended or answered nonsense: {error}") from error

    @staticmethod
    async def _kill(child: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
