"""Runs a function in the processes of a real trainer group and brings back what each of them made of it."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

# A server that has imported everything once forks each rank: that takes milliseconds, an import seconds. It has
# never run a backward pass, after which torch refuses to be forked.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["miles_trainer.trainer", "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe"]
)

Work = Callable[..., Any]


@functools.cache
def _start_server() -> None:
    """The server listens on a socket in the folder for temporary files, whose path may have about 100 characters: that
    of a test session in a checkout is easily longer."""
    usual, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = usual


class Gone:
    """In place of the result of a rank that ended without one."""


def in_group(
    size: int, work: Work, *arguments: Any, timeout_s: float = 60.0, waited_for: Sequence[int] | None = None
) -> list[Any]:
    """Results of `work(ranks, *arguments)` by rank; an error is a result, too.

    Args:
        size: of the group.
        work: an importable function.
        timeout_s: of the group.
        waited_for: the only ranks whose results are wanted; others may be stuck.
    """
    from miles_trainer.ranks import meeting_point

    _start_server()
    store = meeting_point("127.0.0.1", timeout_s=60)
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_rank, args=(theirs, store.port, rank, size, timeout_s, work, arguments))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    wanted = range(size) if waited_for is None else waited_for
    results = [_result(end) if rank in wanted else Gone() for rank, end in enumerate(ends)]
    for process in processes:
        process.kill()
        process.join()
    return results


def _result(end: Connection) -> Any:
    try:
        return end.recv() if end.poll(120) else Gone()
    except EOFError:
        return Gone()


def _rank(end: Connection, port: int, rank: int, size: int, timeout_s: float, work: Work, arguments: Any) -> None:
    import torch

    from miles_trainer.ranks import TorchRanks, meeting_point

    torch.set_num_threads(1)
    try:
        store = meeting_point("127.0.0.1", port, timeout_s=60)
        ranks = TorchRanks(store, rank, size, timeout_s=timeout_s, host="127.0.0.1")
        result = work(ranks, *arguments)
    except Exception as error:  # noqa: BLE001 - process main: the test looks at it
        traceback.print_exc()
        result = error
    end.send(result)
    end.close()
    # Not before the others are done: a rank that leaves early looks like one that was lost.
    signal.pause()
