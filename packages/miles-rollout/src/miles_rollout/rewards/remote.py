"""A reward service over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from miles_contracts import InvalidFieldError, MilesError, Task
from miles_rollout.rewards.base import check_value

_SHOWN = 300


class RemoteRewardError(MilesError):
    """The reward service refused, failed too often, or answered nonsense."""


class RemoteReward:
    """POSTs `{prompt_index, messages, response, label, metadata, source}` and reads `{"reward": number}`.

    Connection errors, timeouts, 429 and 5xx are retried with growing pauses; any other status is final.

    Args:
        url: the service.
        timeout_s: seconds for one try.
        retries: further tries.
        backoff_s: pause before the first retry; it doubles each time.
        max_connections: requests at once.
        headers: for example for authorisation.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        max_connections: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidFieldError("url", url, "give an http:// or https:// address")
        if retries < 0 or not timeout_s > 0 or backoff_s < 0:
            raise InvalidFieldError(
                "retries, timeout_s, backoff_s", (retries, timeout_s, backoff_s), "need >= 0, > 0, >= 0"
            )
        self._url = url
        self.timeout_s = timeout_s
        self.retries = retries
        self._backoff = backoff_s
        self._limit = max_connections
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._session: aiohttp.ClientSession | None = None
        self._counts = dict.fromkeys(("requests", "retries", "failed"), 0)
        self.last_failure = ""
        """Why the last answer that failed to get a reward did so."""

    def take_counts(self) -> dict[str, int]:
        """Since the last call: `requests` made, the `retries` among them, and answers that `failed` to get a reward.

        An answer whose scoring was given up from outside (its time was over) counts as failed, too.
        """
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    async def __call__(self, task: Task, response: str) -> float:
        try:
            return await self._score(task, response)
        except BaseException as error:
            self._counts["failed"] += 1
            self.last_failure = str(error) or "its time was over"
            raise

    async def _score(self, task: Task, response: str) -> float:
        body = msgspec.json.encode(
            {
                "prompt_index": task.prompt_index,
                "messages": [m.to_dict() for m in task.messages],
                "response": response,
                "label": task.label,
                "metadata": task.metadata,
                "source": task.source,
            }
        )
        problem = ""
        for attempt in range(1 + self.retries):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
                self._counts["retries"] += 1
            self._counts["requests"] += 1
            try:
                status, raw = await self._post(body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return self._parse(raw)
            problem = f"HTTP {status}: {raw[:_SHOWN].decode(errors='replace')}"
            if status != 429 and status < 500:
                raise RemoteRewardError(f"{self._url} refused: {problem}")
        raise RemoteRewardError(f"{self._url} failed {1 + self.retries} times, the last: {problem}")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._limit)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(self.timeout_s))
        async with self._session.post(self._url, data=body, headers=self._headers) as answer:
            return answer.status, await answer.read()

    def _parse(self, raw: bytes) -> float:
        try:
            answer = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise RemoteRewardError(f"{self._url} did not answer a JSON object: {error}") from error
        if "reward" not in answer:
            raise RemoteRewardError(f"{self._url} answered without 'reward': it has {', '.join(answer) or 'nothing'}")
        outcome = check_value(answer["reward"])
        if outcome.value is None:
            raise RemoteRewardError(f"{self._url}: {outcome.error}")
        return outcome.value
