"""An agent of two turns, one that fails, and one that is careless with its history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from miles_contracts import AgentResult, SamplingParams, Task


async def two_turns(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """Ask, add something, ask again; the reward is the length of what was said."""
    messages = [m.to_dict() for m in task.messages]
    said = 0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {metadata['api_key']}"}) as session:
        for _ in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 6}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            choice = answer["choices"][0]
            said += answer["usage"]["completion_tokens"]
            if choice["finish_reason"] == "length":
                break
            messages += [choice["message"], {"role": "user", "content": "and then?"}]
    return AgentResult(reward=said / 12, metrics={"said": float(said)})


async def broken(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """Fails."""
    raise RuntimeError("the sandbox is gone")


async def careless(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """Ask, ask the same again, and send the second answer back with a line end that it did not have."""
    messages = [m.to_dict() for m in task.messages]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {metadata['api_key']}"}) as session:
        for asked in range(3):
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                answer = await response.json()
                assert response.status == 200, answer
            choice = answer["choices"][0]
            if asked == 1:
                if choice["finish_reason"] == "length":
                    break
                copied = {**choice["message"], "content": choice["message"]["content"] + "\n"}
                messages += [copied, {"role": "user", "content": "and then?"}]
    return AgentResult(reward=float(answer["usage"]["completion_tokens"] % 3))
