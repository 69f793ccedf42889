"""The official client works unchanged: tools, streams, log-probs, errors."""

from __future__ import annotations

import json

import aiohttp
import pytest
from session_factories import WEATHER
from session_serving import CALL, open_session, serving

openai = pytest.importorskip("openai")


async def test_the_official_client_with_tools(renderer) -> None:
    async with serving(renderer, [CALL, "It rains."], token="secret") as (server, engine):
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http:
            session_id = await open_session(http, server)
        client = openai.AsyncOpenAI(base_url=server.session_url(session_id), api_key="secret", max_retries=0)
        messages: list = [{"role": "user", "content": "Weather in Oslo?"}]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER], logprobs=True)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        assert len(choice.logprobs.content) == first.usage.completion_tokens
        assert choice.logprobs.content[0].token == "<think>"
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "content": "rain", "tool_call_id": choice.message.tool_calls[0].id})
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
        assert second.choices[0].message.content == "It rains."
        with pytest.raises(openai.BadRequestError, match="differs from the stored history"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "edited"}], tools=[WEATHER]
            )
        (trajectory,) = server.service.trajectories(session_id)
        assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
        assert server.service.get(session_id).counters().repairs == {}
        await client.close()


async def test_the_official_client_streams(renderer) -> None:
    async with serving(renderer, [CALL, "It rains in Oslo. " * 20]) as (server, engine):
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        messages: list = [{"role": "user", "content": "Weather in Oslo?"}]
        async with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        message = final.choices[0].message
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": c.id,
                        "type": "function",
                        "function": {"name": c.function.name, "arguments": c.function.arguments},
                    }
                    for c in message.tool_calls
                ],
            }
        )
        messages.append({"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id})
        chunks = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER], stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(pieces) == "It rains in Oslo. " * 20
        assert len(pieces) > 3
        (trajectory,) = session.trajectories(None)
        assert trajectory.num_trained == sum(len(s) for _, s, _ in engine.said.values())
        assert session.counters().repairs == {"reasoning_omitted": 1}
        await client.close()


async def test_the_official_client_completes_ids(renderer) -> None:
    async with serving(renderer, [[70, 71], [72]]) as (server, _):
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        answer = await client.completions.create(model="policy", prompt=[65, 66], logprobs=1)
        assert answer.choices[0].model_extra["token_ids"] == [70, 71]
        assert len(answer.choices[0].logprobs.token_logprobs) == 2
        texts = []
        async for chunk in await client.completions.create(
            model="policy", prompt=[65, 66, 70, 71, 66], stream=True, stream_options={"include_usage": True}
        ):
            texts += [c.text for c in chunk.choices]
        (trajectory,) = session.trajectories(None)
        assert trajectory.token_ids.tolist() == [65, 66, 70, 71, 66, 72]
        assert "".join(texts) == renderer.decode([72])
        await client.close()
