"""A reward function of the user, by import path, kept off the event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from miles_contracts import InvalidFieldError, Task
from miles_rollout.imports import load_object


class UserReward:
    """The function `package.module:name`, called as `name(task, response)`, plain or asynchronous.

    A plain function runs in a thread, so it may block. Python cannot end a thread: one that hangs past its
    deadline fails its trajectory but keeps its slot of `max_threads` until it returns.

    Raises:
        InvalidFieldError: at construction, when it cannot be imported or does not take two arguments.
    """

    def __init__(self, path: str, *, max_threads: int = 8) -> None:
        self._function: Callable[[Task, str], Any] = load_object(path, field="reward")
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004 - looks for an async __call__ of an object
        )
        self._slots = asyncio.Semaphore(max_threads)
        try:
            inspect.signature(self._function).bind(None, "")
        except TypeError as error:
            raise InvalidFieldError("reward", path, f"it is called as reward(task, response): {error}") from error
        except ValueError:
            pass  # a builtin without a signature; the call will tell

    async def __call__(self, task: Task, response: str) -> float:
        if self._is_async:
            result = await self._function(task, response)
        else:
            await self._slots.acquire()
            result = await run_in_thread(self._function, task, response, on_done=self._slots.release)
        return result  # type: ignore[no-any-return]  # checked by `score`


async def run_in_thread(function: Callable[..., Any], *args: Any, on_done: Callable[[], None]) -> Any:
    """Run `function(*args)` in a daemon thread, which cannot hold up the end of the process when it hangs.

    Args:
        function: what to run.
        args: its arguments.
        on_done: called on the event loop once the thread has really ended, also after a cancelled wait.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        on_done()
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses this one
            future.set_exception(RuntimeError("StopIteration"))
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as caught:  # noqa: BLE001 - carried to the caller, like a future does
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future
