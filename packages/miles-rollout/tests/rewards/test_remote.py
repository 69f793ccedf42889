"""A reward service over HTTP, real sockets included."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from miles_contracts import InvalidFieldError, Message, Task
from miles_rollout.rewards import RemoteReward, score

TASK = Task(prompt_index=5, messages=(Message(role="user", content="q"),), label="4", metadata={"a": 1}, source="s")


@pytest.fixture
async def service() -> AsyncIterator[Callable[..., Any]]:
    """Starts a server whose answers are `replies`, in order; returns its URL and what it was asked."""
    runners = []

    async def start(*replies: Callable[[], Any]) -> tuple[str, list[Any]]:
        asked: list[Any] = []
        queue = list(replies)

        async def answer(request: web.Request) -> web.Response:
            asked.append(await request.json())
            reply = queue.pop(0)()
            return await reply if inspect.isawaitable(reply) else reply

        app = web.Application()
        app.router.add_post("/score", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/score", asked

    yield start
    for runner in runners:
        await runner.cleanup()


def ok(value: Any) -> Callable[[], web.Response]:
    return lambda: web.json_response({"reward": value})


async def test_asks_and_reads(service) -> None:
    url, asked = await service(ok(0.5))
    reward = RemoteReward(url)
    assert (await score(reward, TASK, "answer")).value == 0.5
    assert asked == [
        {
            "prompt_index": 5,
            "messages": [{"role": "user", "content": "q"}],
            "response": "answer",
            "label": "4",
            "metadata": {"a": 1},
            "source": "s",
        }
    ]
    await reward.close()


async def test_failures_are_retried(service) -> None:
    def broken() -> web.Response:
        return web.Response(status=503, text="warming up")

    def busy() -> web.Response:
        return web.Response(status=429)

    url, asked = await service(broken, busy, ok(1))
    reward = RemoteReward(url, backoff_s=0.001)
    assert (await score(reward, TASK, "x")).value == 1.0
    assert len(asked) == 3
    await reward.close()


async def test_retries_end(service) -> None:
    url, asked = await service(*[lambda: web.Response(status=500, text="boom")] * 3)
    reward = RemoteReward(url, retries=2, backoff_s=0.001)
    assert "failed 3 times, the last: HTTP 500: boom" in ((await score(reward, TASK, "x")).error or "")
    assert len(asked) == 3
    await reward.close()


async def test_a_refusal_is_final(service) -> None:
    url, asked = await service(lambda: web.Response(status=400, text="bad label"))
    reward = RemoteReward(url, backoff_s=0.001)
    assert "refused: HTTP 400: bad label" in ((await score(reward, TASK, "x")).error or "")
    assert len(asked) == 1
    await reward.close()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda: web.Response(text="<html>"), "JSON object"),
        (lambda: web.json_response({"score": 1}), "without 'reward'"),
        (ok("good"), "returned str"),
        (ok(None), "NoneType"),
    ],
)
async def test_nonsense_is_a_failure(service, reply, reason: str) -> None:
    url, _ = await service(reply)
    reward = RemoteReward(url)
    assert reason in ((await score(reward, TASK, "x")).error or "")
    await reward.close()


async def test_a_request_that_hangs_is_made_again(service) -> None:
    async def hangs() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("it ended")

    url, asked = await service(hangs, ok(0.25))
    reward = RemoteReward(url, timeout_s=1.0, backoff_s=0.001)
    assert (await score(reward, TASK, "x")).value == 0.25
    assert len(asked) == 2
    assert reward.take_counts() == {"requests": 2, "retries": 1, "failed": 0}
    await reward.close()


async def test_what_happened_is_counted(service) -> None:
    def broken() -> web.Response:
        return web.Response(status=500)

    url, asked = await service(broken, ok(1), broken, broken, lambda: web.Response(text="<html>"), ok("good"))
    reward = RemoteReward(url, retries=1, backoff_s=0.001)
    outcomes = [(await score(reward, TASK, "x")).value for _ in range(4)]
    assert outcomes == [1.0, None, None, None]
    assert reward.take_counts() == {"requests": len(asked), "retries": 2, "failed": 3}
    assert reward.take_counts() == {"requests": 0, "retries": 0, "failed": 0}
    assert "returned str" in reward.last_failure
    await reward.close()


async def test_an_answer_whose_time_is_over_counts_as_failed(service) -> None:
    async def hangs() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("it ended")

    url, _ = await service(hangs)
    reward = RemoteReward(url)
    assert "no answer within 0.3 s" in ((await score(reward, TASK, "x", timeout_s=0.3)).error or "")
    assert reward.take_counts() == {"requests": 1, "retries": 0, "failed": 1}
    assert reward.last_failure == "its time was over"
    await reward.close()


async def test_nobody_listens() -> None:
    reward = RemoteReward("http://127.0.0.1:9/score", retries=1, backoff_s=0.001)
    assert "failed 2 times" in ((await score(reward, TASK, "x")).error or "")
    await reward.close()


@pytest.mark.parametrize("bad", [{"url": "ftp://x"}, {"retries": -1}, {"timeout_s": 0}, {"backoff_s": -1}])
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidFieldError):
        RemoteReward(**({"url": "http://x"} | bad))
