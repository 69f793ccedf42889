"""A rollout worker's own process: `python -m miles_loop.rollout_process LINK`.

LINK is the number of a connected socket to the driver, or the driver's `host:port`. Needs no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback

from miles_loop import rollout_link as link
from miles_loop.frames import FrameLink
from miles_loop.rollout_server import RolloutService
from miles_loop.tcp_link import linked


async def _serve(where: str) -> None:
    """Serve the driver until it is gone, or says by SIGTERM that this is the end."""
    serving, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert serving is not None
    ending = asyncio.Event()

    def end() -> None:
        # Once: a driver that hangs up says so too, and what is being closed must not be interrupted.
        if not ending.is_set():
            ending.set()
            serving.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    sock = await asyncio.to_thread(linked, where)
    service = RolloutService()
    connection: FrameLink[link.ToWorker] = await FrameLink.open(sock, link.ToWorker, service.take)
    connection.ended.add_done_callback(lambda _: ending.set())
    try:
        await service.serve(connection)
    finally:
        await connection.close()


def main() -> None:
    """Serve the driver that the first argument names."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    status = 1
    try:
        asyncio.run(_serve(sys.argv[1]))
        status = 0
    except asyncio.CancelledError:
        status = 0
    except BaseException:  # noqa: BLE001 - process main: the log is the only reader left
        traceback.print_exc()
    finally:
        # A thread of a user's reward may hang for ever; nothing is left to be done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
