"""Any program can evaluate: it gets the snapshot's folder and prints a JSON object of numbers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from miles_contracts import InvalidFieldError
from miles_rollout.evaluation.points import EvaluationSkippedError

_SHOWN = 400
_MAX_OUTPUT = 16 * 2**20

Tie = Callable[[Sequence[str]], AbstractContextManager[tuple[Sequence[str], Sequence[int]]]]
"""What is run instead of a command, and the descriptors that it inherits, for as long as the context is open."""


class ExternalEvaluator:
    """An Evaluator that runs a command.

    Args:
        command: program and arguments; `{checkpoint}` and `{version}` in them are replaced.
        environment: variables added to those of this process.
        tie: makes of the command one that ends when this process is killed; without it the program then runs on.

    The last line of standard output is a JSON object `{"name": number, ...}`; each becomes `eval/<name>`. Exit
    status 0 is success. The command and what it started are killed when the evaluation is cancelled or too slow.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, tie: Tie | None = None
    ) -> None:
        if not command or not command[0]:
            raise InvalidFieldError("command", list(command), "name a program")
        if not any("{checkpoint}" in part for part in command):
            raise InvalidFieldError("command", list(command), "use {checkpoint} where the folder belongs")
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._tie: Tie = tie or (lambda command: contextlib.nullcontext((command, ())))

    async def __call__(self, version: int, checkpoint: Path | None) -> Mapping[str, float]:
        """Run the command.

        Raises:
            EvaluationSkippedError: it cannot be started, fails, or prints something else (`crashed`).
        """
        if checkpoint is None:
            raise InvalidFieldError("checkpoint", None, "an external evaluation needs the snapshot's folder")
        argv = [
            part.replace("{checkpoint}", str(checkpoint)).replace("{version}", str(version)) for part in self._command
        ]
        with self._tie(argv) as (command, inherited):
            status, out, err = await self._run(argv[0], command, inherited)
        if status != 0:
            tail = err.decode(errors="replace").strip()[-_SHOWN:] or out.decode(errors="replace").strip()[-_SHOWN:]
            said = f": {tail}" if tail else " and printed nothing"
            raise EvaluationSkippedError("crashed", f"{argv[0]} ended with status {status}{said}")
        return self._parse(out)

    async def _run(self, name: str, command: Sequence[str], inherited: Sequence[int]) -> tuple[int, bytes, bytes]:
        """Exit status, output and errors."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | self._environment,
                start_new_session=True,
                pass_fds=inherited,
            )
        except OSError as error:
            raise EvaluationSkippedError("crashed", f"{name} cannot be started: {error.strerror}") from error
        try:
            out, err = await process.communicate()
        finally:
            # Its own session: this ends children of the command, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert process.returncode is not None
        return process.returncode, out, err

    @staticmethod
    def _parse(out: bytes) -> dict[str, float]:
        lines = out[-_MAX_OUTPUT:].strip().splitlines()
        last = lines[-1] if lines else b""
        try:
            values = msgspec.json.decode(last, type=dict[str, float])
        except msgspec.MsgspecError as error:
            shown = last[:_SHOWN].decode(errors="replace")
            raise EvaluationSkippedError("crashed", f"the last line is no object of numbers: {shown!r}") from error
        if not values or not all(math.isfinite(v) for v in values.values()):
            raise EvaluationSkippedError("crashed", f"need at least one number, all finite, got {values}")
        return {f"eval/{name}": value for name, value in values.items()}
