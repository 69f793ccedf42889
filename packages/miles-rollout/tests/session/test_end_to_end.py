"""A real engine process, a real client: tools over several turns, and every id is the engine's.

The model is a two-layer Qwen3 that has learnt one conversation by heart, so that it really calls the tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_factories import WEATHER, assistant, call, tool, user, write_tokenizer

from miles_contracts import GenerateResult, PauseMode, Trajectory, wire
from miles_rollout.engine_client import EngineClient
from miles_rollout.engine_stream import PartialResult
from miles_rollout.renderers import load_renderer
from miles_rollout.router import Router
from miles_rollout.session import Policy, SessionConfig, SessionServer, audit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
aiohttp = pytest.importorskip("aiohttp")

QUESTION = "Weather in Oslo?"
CALLS = [call("weather", '{"city": "Oslo"}', "")]
CONVERSATION = [user(QUESTION), assistant(None, calls=CALLS), tool("rain", ""), assistant("It rains.")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("trained")
    write_tokenizer(folder)
    renderer = load_renderer(folder, "qwen3")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.Qwen3Config(
        vocab_size=renderer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=renderer.stop_token_ids[0],
    )
    model = transformers.Qwen3ForCausalLM(config)
    ids = torch.tensor([renderer.render(CONVERSATION, [WEATHER], add_generation_prompt=False)])
    learnt = ids.shape[1] - 150
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(120):
        logits = model(ids).logits[0, learnt:-1]
        if bool((logits.argmax(-1) == ids[0, learnt + 1 :]).all()):
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, ids[0, learnt + 1 :]).backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.fixture(scope="module")
def engine_url(trained: tuple[Path, Any]) -> Iterator[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "miles_rollout.engine", "--model-path", str(trained[0]), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("miles-engine ready: "):
                yield line.split()[2]
                break
        process.terminate()


def logprobs_of(model: Any, trajectory: Trajectory) -> np.ndarray:
    """float32 [T], Hugging Face's own log-probs of the ids, NaN at 0."""
    ids = torch.tensor(trajectory.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    picked = table[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate(([np.nan], picked)).astype(np.float32)


async def test_tools_over_several_turns(trained: tuple[Path, Any], engine_url: str) -> None:
    folder, model = trained
    renderer = load_renderer(folder, "qwen3")
    async with EngineClient(engine_url) as engine, SessionServer(Router([engine]), renderer) as server:
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        settings: dict[str, Any] = {"model": "policy", "tools": [WEATHER], "temperature": 0.0, "max_tokens": 100}
        first = await client.chat.completions.create(messages=messages, **settings)
        (asked,) = first.choices[0].message.tool_calls
        assert json.loads(asked.function.arguments) == {"city": "Oslo"}
        # The harness spells the arguments its own way; the stored tokens stay.
        copy = {"id": asked.id, "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
        messages += [
            {"role": "assistant", "tool_calls": [copy]},
            {"role": "tool", "content": "rain", "tool_call_id": asked.id},
        ]
        second = await client.chat.completions.create(messages=messages, **settings)
        assert second.choices[0].message.content == "It rains."
        assert second.usage.prompt_tokens_details.cached_tokens > 0
        messages += [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Thanks"}]
        stream = await client.chat.completions.create(messages=messages, stream=True, **settings)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await client.close()
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/sessions/{session.id}/trajectories") as got:
            (trajectory,) = wire.decode(await got.read(), list[Trajectory])
        counters = session.counters()

    assert len(trajectory.turns) == 3
    last = trajectory.turns[2]
    assert text == renderer.parse(trajectory.token_ids[last.start : last.end].tolist(), [WEATHER]).content
    assert counters.repairs == {"arguments_reserialised": 1}
    assert audit([trajectory]).mismatches == 0
    # The ids are those that rendering the whole conversation gives, up to the third reply (which is the model's own).
    known = [*CONVERSATION, user("Thanks")]
    assert trajectory.token_ids[: last.start].tolist() == renderer.render(known, [WEATHER])
    # An engine that sampled these ids gives them these log-probs; so does Hugging Face.
    want = logprobs_of(model, trajectory)
    mask = trajectory.loss_mask
    assert mask.sum() == sum(t.end - t.start for t in trajectory.turns)
    assert np.abs(trajectory.logprobs[mask] - want[mask]).max() < 1e-3
    assert {s.version for s in trajectory.version_spans} == {0} or trajectory.has_unknown_version


@pytest.fixture(scope="module")
def command_url(trained: tuple[Path, Any], engine_url: str) -> Iterator[str]:
    """`miles-session` in front of the engine."""
    command = [sys.executable, "-m", "miles_rollout.session.cli", "--engine", engine_url, "--model", str(trained[0])]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


async def test_the_command_learns_the_context_of_its_engine(command_url: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{command_url}/sessions") as opened:
        base = command_url + (await opened.json())["base_url"]
    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    assert (await client.models.list()).data[0].max_model_len == 4096
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="policy", messages=long, max_tokens=4)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    short = [{"role": "user", "content": QUESTION}]
    answer = await client.chat.completions.create(model="policy", messages=short, max_tokens=4)
    assert 1 <= answer.usage.completion_tokens <= 4
    await client.close()


async def test_a_forced_call_is_sampled_from_the_policy_itself(trained: tuple[Path, Any], engine_url: str) -> None:
    folder, model = trained
    renderer = load_renderer(folder, "qwen3")
    forced = {"type": "function", "function": {"name": "weather"}}
    async with EngineClient(engine_url) as engine, SessionServer(Router([engine]), renderer) as server:
        session = server.service.open()
        async with openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            settings: dict[str, Any] = {"model": "policy", "tools": [WEATHER], "temperature": 0.0, "max_tokens": 100}
            first = await client.chat.completions.create(messages=messages, tool_choice=forced, **settings)
            (asked,) = first.choices[0].message.tool_calls
            assert (asked.function.name, json.loads(asked.function.arguments)) == ("weather", {"city": "Oslo"})
            messages += [
                first.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "content": "rain", "tool_call_id": asked.id},
            ]
            second = await client.chat.completions.create(messages=messages, **settings)
            assert second.choices[0].message.content == "It rains."
        (trajectory,) = server.service.trajectories(session.id)
        opening = session.describe()["nodes"][0]["forced_tokens"]
    # The whole is what rendering the conversation gives; the opening was not sampled, what follows it was.
    assert trajectory.token_ids.tolist() == renderer.render(CONVERSATION, [WEATHER], add_generation_prompt=False)[:-1]
    start = trajectory.turns[0].start
    assert renderer.decode(trajectory.token_ids[start - opening : start].tolist()).startswith('<tool_call>\n{"name"')
    assert not trajectory.loss_mask[:start].any()
    assert trajectory.num_trained == sum(t.end - t.start for t in trajectory.turns)
    # No token was masked for the call: the log-probs are those of the model, as a trainer computes them.
    want, mask = logprobs_of(model, trajectory), trajectory.loss_mask
    assert np.abs(trajectory.logprobs[mask] - want[mask]).max() < 1e-3
    assert audit([trajectory]).mismatches == 0


async def test_many_sessions_at_once_on_a_sampling_policy(trained: tuple[Path, Any], engine_url: str) -> None:
    folder, model = trained
    renderer = load_renderer(folder, "qwen3")
    config = SessionConfig(policy=Policy.BRANCHING)
    async with EngineClient(engine_url) as engine, SessionServer(Router([engine]), renderer, config) as server:

        async def talk(index: int) -> tuple[Trajectory, ...]:
            session = server.service.open()
            async with openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none") as client:
                messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {index}"}]
                for turn in range(3):
                    answer = await client.chat.completions.create(
                        model="policy", messages=messages, max_tokens=60, seed=100 * index + turn
                    )
                    if answer.choices[0].finish_reason == "length":
                        messages = [{"role": "user", "content": f"summary {turn}"}]
                        continue
                    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                    messages.append({"role": "user", "content": "and then?"})
            return server.service.trajectories(session.id)

        found = [t for trajectories in await asyncio.gather(*(talk(i) for i in range(6))) for t in trajectories]
    assert audit(found).mismatches == 0
    assert sum(len(t.turns) for t in found) >= 18
    for trajectory in found:
        want, mask = logprobs_of(model, trajectory), trajectory.loss_mask
        assert np.abs(trajectory.logprobs[mask] - want[mask]).max() < 1e-3


class HeldEngine(EngineClient):
    """Pauses the engine as soon as it has shown the first tokens, and passes those on."""

    held = False
    answer: GenerateResult | None = None

    async def generate_stream(self, *args: Any, **fields: Any) -> AsyncGenerator[PartialResult | GenerateResult, None]:
        async with aclosing(super().generate_stream(*args, **fields)) as results:
            async for result in results:
                if not self.held:
                    self.held = True
                    await self.pause(PauseMode.IN_PLACE)
                if isinstance(result, GenerateResult):
                    self.answer = result
                yield result


async def test_a_stream_begins_before_the_engine_has_finished(trained: tuple[Path, Any], engine_url: str) -> None:
    folder, model = trained
    renderer = load_renderer(folder, "qwen3").with_options(thinking=False)
    async with HeldEngine(engine_url) as engine, SessionServer(Router([engine]), renderer) as server:
        session = server.service.open()
        client = openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "Talk!"}],
            max_tokens=1500,
            seed=3,  # talks for long
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = aiter(stream)
        pieces: list[str] = []
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                break
        state = await engine.server_info()
        assert (state["running_requests"], state["paused"]) == (1, True)  # the engine is in the middle of the answer
        assert session.tree.nodes == []
        await engine.resume()
        async for chunk in chunks:
            if chunk.choices:
                pieces.append(chunk.choices[0].delta.content or "")
        await client.close()
        (trajectory,) = server.service.trajectories(session.id)
        (node,) = session.tree.nodes
    assert "".join(pieces) == node.reply.content
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == engine.answer.output_ids.tolist()
    assert chunk.usage.completion_tokens == trajectory.loss_mask.sum() > 200
    assert audit([trajectory]).mismatches == 0
    # The ids are the engine's: it gave them the log-probs that Hugging Face gives them.
    want, mask = logprobs_of(model, trajectory), trajectory.loss_mask
    assert np.abs(trajectory.logprobs[mask] - want[mask]).max() < 1e-3


async def test_a_client_that_hangs_up_frees_the_engine(trained: tuple[Path, Any], engine_url: str) -> None:
    renderer = load_renderer(trained[0], "qwen3").with_options(thinking=False)
    async with EngineClient(engine_url) as engine, SessionServer(Router([engine]), renderer) as server:
        session = server.service.open()
        async with openai.AsyncOpenAI(base_url=server.session_url(session.id), api_key="none") as client:
            stream = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Talk!"}],
                max_tokens=3500,
                seed=39,  # talks for long
                stream=True,
            )
            await anext(aiter(stream))
            await stream.close()
        async with asyncio.timeout(60):
            while session.in_flight or (await engine.server_info())["running_requests"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert session.tree.nodes == []
