"""Any program can evaluate: it gets the snapshot's folder and prints a JSON object of numbers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from miles_contracts import InvalidFieldError
from miles_rollout.evaluation.points import EvaluationSkippedError

_SHOWN = 400
_MAX_OUTPUT = 16 * 2**20


class ExternalEvaluator:
    """An Evaluator that runs a command.

    Args:
        command: program and arguments; `{checkpoint}` and `{version}` in them are replaced.
        environment: variables added to those of this process.

    The last line of standard output is a JSON object `{"name": number, ...}`; each becomes `eval/<name>`. Exit
    status 0 is success. The command and what it started are killed when the evaluation is cancelled or too slow.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        if not command or not command[0]:
            raise InvalidFieldError("command", list(command), "name a program")
        if not any("{checkpoint}" in part for part in command):
            raise InvalidFieldError("command", list(command), "use {checkpoint} where the folder belongs")
        self._command = tuple(command)
        self._environment = dict(environment or {})

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
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise EvaluationSkippedError("crashed", f"{argv[0]} cannot be started: {error.strerror}") from error
        try:
            out, err = await process.communicate()
        finally:
            # Its own session: this ends children of the command, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            tail = err.decode(errors="replace").strip()[-_SHOWN:] or out.decode(errors="replace").strip()[-_SHOWN:]
            said = f": {tail}" if tail else " and printed nothing"
            raise EvaluationSkippedError("crashed", f"{argv[0]} ended with status {process.returncode}{said}")
        return self._parse(out)

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
