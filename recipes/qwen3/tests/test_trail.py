"""The trail game, played by scripted players through a real session server in front of a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_contracts import InvalidFieldError, Message, SamplingParams, Task
from miles_qwen3 import RECIPE, trail
from miles_qwen3.model import PHRASES, build_tiny_tools
from miles_qwen3.sorting import data_file
from miles_qwen3.trail_agent import closeness, play
from miles_rollout.engine_client import EngineClient
from miles_rollout.renderers import Renderer, detect_family, load_renderer
from miles_rollout.session import SessionServer

Player = Callable[[str], str]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tiny-tools")
    build_tiny_tools(folder, 0)
    return load_renderer(folder)


@asynccontextmanager
async def served(renderer: Renderer, player: Player, finish: str = "stop") -> AsyncIterator[str]:
    """The base URL of a session whose engine says what `player` makes of the prompt's text."""

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        text = player(renderer.decode(body["input_ids"], skip_special_tokens=False))
        ids = [i for p in renderer.vocabulary.split(text) for i in _ids(renderer, p)] + [renderer.stop_token_ids[0]]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": finish},
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as engine, EngineClient(str(engine.make_url("")).rstrip("/")) as client:
        async with SessionServer(client, renderer) as server:
            yield server.session_url(server.service.open().id)


def _ids(renderer: Renderer, piece: int | str) -> Sequence[int]:
    return [piece] if isinstance(piece, int) else renderer.vocabulary.encode(piece)


def task(label: Any, **metadata: Any) -> Task:
    return Task(prompt_index=0, messages=(Message(role="user", content="x"),), label=label, metadata=metadata)


def follows(prompt: str) -> str:
    """Calls what the last note asks for."""
    turn = prompt.rpartition("<|im_start|>user\n")[2]
    note = turn.removeprefix("start ").removeprefix("<tool_response>\n")[0]
    return f"<tool_call>\n{trail.CALLS[note]}\n</tool_call>"


@pytest.mark.parametrize("label", ["c", "3c", "03d", "21a"])
async def test_who_reads_the_notes_wins(renderer: Renderer, label: str) -> None:
    async with served(renderer, follows) as url:
        result = await play(url, task(label), SamplingParams(max_new_tokens=16), {"api_key": "none"})
    assert result.metrics == {"won": 1.0, "right_steps": float(len(label)), "tool_calls": float(len(label))}
    assert result.reward == 1.0


@pytest.mark.parametrize(
    ("said", "low", "high"), [(trail.CALLS["0"], 0.7, 0.8), ("x", 0.4, 0.6), (trail.CALLS["a"], 0.7, 0.8)]
)
async def test_a_wrong_call_ends_the_game(renderer: Renderer, said: str, low: float, high: float) -> None:
    asked: list[str] = []

    def player(prompt: str) -> str:
        asked.append(prompt)
        return "<tool_call>" + said

    async with served(renderer, player) as url:
        result = await play(url, task("3c"), SamplingParams(max_new_tokens=16), {"api_key": "none"})
        held_out = await play(url, task("3c", all_or_nothing=True), SamplingParams(), {"api_key": "none"})
    assert low < (result.reward or 0.0) < high
    assert (held_out.reward, len(asked)) == (0.0, 2)


async def test_held_out_games_are_won_or_not(renderer: Renderer) -> None:
    async with served(renderer, follows) as url:
        won = await play(url, task("3c", all_or_nothing=True), SamplingParams(max_new_tokens=16), {"api_key": "none"})
    assert won.reward == 1.0


async def test_a_turn_at_its_length_limit_is_worth_half(renderer: Renderer) -> None:
    async with served(renderer, follows, finish="length") as url:
        result = await play(url, task("3c"), SamplingParams(max_new_tokens=16), {"api_key": "none"})
    assert (result.reward, result.metrics["right_steps"]) == (0.5, 0.0)


def test_nearer_is_worth_more() -> None:
    wanted = ["<tool_call>", trail.CALLS["3"]]
    tries = [
        ["x"],
        ["<tool_call>", "x"],
        ["<tool_call>", trail.CALLS["0"]],
        wanted,
    ]
    worth = [closeness(said, wanted) for said in tries]
    assert worth == sorted(worth)
    assert len(set(worth)) == len(worth)
    assert worth[-1] == 1.0
    assert closeness(["<tool_call>", trail.CALLS["a"]], wanted) == worth[2]
    assert closeness([*wanted, "x"], wanted) < 1.0
    assert closeness([], wanted) == 0.0


@pytest.mark.parametrize("label", [None, "", "cc", "3", "33", "9c", 3])
async def test_a_task_without_a_trail_is_refused(label: Any) -> None:
    with pytest.raises(InvalidFieldError, match="label"):
        await play("http://unused", task(label), SamplingParams(), {"api_key": "none"})


def test_files_are_what_the_generator_writes_and_nothing_held_out_is_trained(tmp_path: Path) -> None:
    trail.write_files(tmp_path)
    for name in (trail.TRAIN_FILE, trail.HELD_OUT_FILE):
        assert data_file(name).read_bytes() == (tmp_path / name).read_bytes()
    train, held_out = trail.trails()
    assert not set(trail.training_games()) & set(held_out)
    assert set(trail.training_games()) == {*train, *trail.LETTERS}
    assert len(held_out) == trail.HELD_OUT == RECIPE.task_named("trail").overrides["task"]["eval_size"]
    assert {len(t) for t in train} == {len(t) for t in held_out} == {2, 3}


def test_the_model_writes_its_calls_in_two_tokens_and_its_format_is_qwen3s(renderer: Renderer, tmp_path: Path) -> None:
    build_tiny_tools(tmp_path, 0)
    found = detect_family(tmp_path)
    assert (found.family, found.disagreements) == ("qwen3", ())
    declared = renderer.render([Message(role="user", content="start 3")], trail.TOOLS)
    assert len(declared) < 30
    assert all(len(list(renderer.vocabulary.split(text))) == 1 for text in PHRASES)
    for note, text in trail.CALLS.items():
        ids = [renderer.vocabulary.id("<tool_call>"), renderer.vocabulary.id(text), renderer.stop_token_ids[0]]
        (call,) = renderer.parse(ids, trail.TOOLS).tool_calls
        assert str(next(iter(json.loads(call.function.arguments).values()))) == note
