"""One question to the session server, for agents that need no more than that: OpenAI's chat API over aiohttp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from miles_contracts import SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        message: the assistant's message, to be sent back as it is.
        complete: false when the turn met its length limit; such a turn cannot be continued.
        written: the text of all sampled tokens, control tokens included; "" unless log-probs were asked for.
    """

    message: dict[str, Any]
    complete: bool
    written: str = ""

    @property
    def content(self) -> str:
        """The text, "" when there is none."""
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls."""
        return list(self.message.get("tool_calls") or ())


class Chat:
    """A conversation with the policy; use it as an async context manager.

    Args:
        base_url: what the agent was given.
        params: its length limit is asked for; the rest of it the session has already.
        metadata: what the agent was given; holds the server's key.
        tools: OpenAI tool objects.
        logprobs: ask for the sampled tokens as well.
    """

    def __init__(
        self,
        base_url: str,
        params: SamplingParams,
        metadata: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        logprobs: bool = False,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._body: dict[str, Any] = {"model": "policy", "max_tokens": params.max_new_tokens}
        if tools:
            self._body["tools"] = list(tools)
        if logprobs:
            self._body["logprobs"] = True
        self._client = aiohttp.ClientSession(headers={"Authorization": f"Bearer {metadata['api_key']}"})
        self._messages: list[dict[str, Any]] = []

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def ask(self, *messages: dict[str, Any]) -> Reply:
        """Append messages, get the answer, and append that too.

        Raises:
            aiohttp.ClientError: the server refused, or cannot be reached.
        """
        self._messages += messages
        async with self._client.post(self._url, json={**self._body, "messages": self._messages}) as response:
            response.raise_for_status()
            choice = (await response.json())["choices"][0]
        self._messages.append(choice["message"])
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        written = "".join(token["token"] for token in tokens)
        return Reply(choice["message"], choice["finish_reason"] != "length", written)
