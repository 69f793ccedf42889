"""One conversation with the policy over a session, turn by turn, for environments that answer with text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp

from miles_contracts import Message, SamplingParams
from miles_rollout.environments.errors import EnvironmentFailedError


class Conversation:
    """Messages so far, and the next answer.

    Args:
        base_url: of the session, as an agent gets it.
        messages: how it begins.
        params: of every answer.
        metadata: of the episode; `api_key` is the session server's token.

    Use it as a context manager. `cut` is true once an answer ended at its length limit: nothing can follow it.
    """

    def __init__(
        self, base_url: str, messages: Sequence[Message], params: SamplingParams, metadata: Mapping[str, Any]
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content or ""} for m in messages]
        self._params = params
        self._headers = {"Authorization": f"Bearer {metadata.get('api_key') or 'none'}"}
        self._session: aiohttp.ClientSession | None = None
        self.turns = 0
        self.cut = False

    async def __aenter__(self) -> Conversation:
        # How long an answer may take is the session server's business.
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def say(self, text: str) -> None:
        """What the environment says before the next answer; it continues the task's own words, if there are any."""
        if self._messages and self._messages[-1]["role"] == "user":
            begun = self._messages.pop()["content"]
            text = f"{begun}\n\n{text}" if begun else text
        self._messages.append({"role": "user", "content": text})

    async def answer(self) -> str:
        """The policy's next answer.

        Raises:
            EnvironmentFailedError: the session server refused or could not get one.
        """
        assert self._session is not None
        body = {"model": "policy", "messages": self._messages, "max_tokens": self._params.max_new_tokens}
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise EnvironmentFailedError(f"no answer from the policy: {await response.text():.500}")
                choice = (await response.json())["choices"][0]
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailedError(f"no answer from the policy: {type(error).__name__}: {error}") from error
        # The message goes back as it came: the session compares it with what it has stored.
        self._messages.append(choice["message"])
        self.turns += 1
        self.cut = choice["finish_reason"] == "length"
        return str(choice["message"].get("content") or "")
