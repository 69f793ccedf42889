"""The trail game, played by scripted players through a real session server in front of a scripted engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError, Message, SamplingParams, Task
from miles_qwen3 import RECIPE, trail
from miles_qwen3.model import PHRASES, build_tiny_tools
from miles_qwen3.sorting import data_file
from miles_qwen3.trail_agent import END, WRONG_TURN, closeness, in_order, play
from miles_rollout.engine_client import EngineClient
from miles_rollout.renderers import Renderer, detect_family, load_renderer
from miles_rollout.session import SessionServer

Player = Callable[[str], str]
LIMIT = SamplingParams(max_new_tokens=64)
KEY = {"api_key": "none"}


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


def call(place: object) -> str:
    return f"{trail.BEFORE}{place}{trail.AFTER}"


def note(prompt: str) -> str:
    """The place that the last message names."""
    turn = prompt.rpartition("<|im_start|>user\n")[2]
    return turn.removeprefix("<tool_response>\n")[0]


def follows(prompt: str) -> str:
    """Calls what the last note asks for."""
    return call(note(prompt))


@pytest.mark.parametrize("label", ["3", "03", "213"])
async def test_who_reads_the_notes_wins(renderer: Renderer, label: str) -> None:
    for metadata in ({}, {"all_or_nothing": True}):
        async with served(renderer, follows) as url:
            result = await play(url, task(label, **metadata), LIMIT, KEY)
        assert result.metrics == {"won": 1.0, "right_turns": float(len(label)), "tool_calls": float(len(label))}
        assert result.reward == 1.0


@pytest.mark.parametrize("player", [lambda _: call(3), lambda p: call((int(note(p)) + 1) % 4)])
async def test_who_does_not_read_them_wins_no_trail_of_several_places(renderer: Renderer, player: Player) -> None:
    """One call repeated, or a wrong place each time: not even a game whose first place is the one repeated."""
    for label in trail.trails()[1]:
        async with served(renderer, player) as url:
            result = await play(url, task(label, all_or_nothing=True), LIMIT, KEY)
        assert (result.reward, result.metrics["won"]) == (0.0, 0.0)


async def test_the_first_wrong_turn_ends_the_game_and_counts_for_the_rest(renderer: Renderer) -> None:
    asked: list[str] = []

    def player(prompt: str) -> str:
        asked.append(prompt)
        return call(2)

    async with served(renderer, player) as url:
        result = await play(url, task("203"), LIMIT, KEY)
    assert len(asked) == 2
    assert result.metrics == {"won": 0.0, "right_turns": 1.0, "tool_calls": 2.0}
    wrong = closeness([trail.BEFORE, "2", trail.AFTER, END], [trail.BEFORE, "0", trail.AFTER, END])
    assert result.reward == pytest.approx((1 + 2 * wrong) / 3)


@pytest.mark.parametrize(
    ("said", "pieces"),
    [
        ("x" + call(3), ["x", trail.BEFORE, "3", trail.AFTER, END]),
        (call(3) + "x", [trail.BEFORE, "3", trail.AFTER, "x", END]),
        (call(3) + "\n" + call(3), [trail.BEFORE, "3", trail.AFTER, "\n", trail.BEFORE, "3", trail.AFTER, END]),
        (trail.BEFORE + "3", [trail.BEFORE, "3", END]),
        (call('"3"'), [trail.BEFORE, '"', "3", '"', trail.AFTER, END]),
        ("", [END]),
    ],
)
async def test_a_turn_that_is_not_one_call_alone_is_wrong(renderer: Renderer, said: str, pieces: list[str]) -> None:
    """And is worth what stands in it, in the order in which it was sampled: the parsed message would hide that."""
    async with served(renderer, lambda _: said) as url:
        result = await play(url, task("3"), LIMIT, KEY)
    assert result.metrics["right_turns"] == 0.0
    assert result.reward == pytest.approx(closeness(pieces, [trail.BEFORE, "3", trail.AFTER, END]))


async def test_a_turn_at_its_length_limit_is_not_right(renderer: Renderer) -> None:
    async with served(renderer, follows, finish="length") as url:
        result = await play(url, task("3"), LIMIT, KEY)
    assert result.metrics["right_turns"] == 0.0
    assert result.reward == pytest.approx(
        closeness([trail.BEFORE, "3", trail.AFTER], [trail.BEFORE, "3", trail.AFTER, END])
    )


def test_nearer_is_worth_more() -> None:
    before, after = trail.BEFORE, trail.AFTER
    wanted = [before, "3", after, END]
    tries = [
        [],
        [END],
        ["x", "3", END],
        ["x", before, "3", after, END],
        [before, "3", END],
        [before, "3", after],
    ]
    worth = [closeness(said, wanted) for said in tries]
    assert worth == sorted(worth)
    assert worth[0] == worth[1] == 0.0
    assert worth[-1] < WRONG_TURN
    assert closeness([before, "0", after, END], wanted) < closeness(tries[-1], wanted)


def test_no_place_is_worth_more_than_another_to_who_does_not_read() -> None:
    """The mean over all first notes of a blind call, whatever it is: far from a right turn, and nothing to prefer."""
    worth = {
        blind: sum(
            1.0
            if blind == place
            else closeness([trail.BEFORE, blind, trail.AFTER, END], [trail.BEFORE, place, trail.AFTER, END])
            for place in trail.PLACES
        )
        / len(trail.PLACES)
        for blind in trail.PLACES
    }
    assert len(set(worth.values())) == 1
    assert worth["0"] < 0.7


@given(st.lists(st.sampled_from([trail.BEFORE, "0", "3", trail.AFTER, "x", END]), max_size=8))
def test_a_wrong_turn_is_never_worth_as_much_as_a_right_one(said: list[str]) -> None:
    assert 0.0 <= closeness(said, [trail.BEFORE, "3", trail.AFTER, END]) <= WRONG_TURN < 1.0


@given(*[st.lists(st.integers(0, 3), max_size=6)] * 2)
def test_in_order_is_the_longest_common_subsequence(said: list[int], wanted: list[int]) -> None:
    def is_within(part: Sequence[int], whole: Sequence[int]) -> bool:
        rest = iter(whole)
        return all(item in rest for item in part)

    subsets = (list(part) for size in range(len(wanted), -1, -1) for part in itertools.combinations(wanted, size))
    assert in_order(list(map(str, said)), list(map(str, wanted))) == next(len(p) for p in subsets if is_within(p, said))


@pytest.mark.parametrize("label", [None, "", "4", "0a", "0 1", 3])
async def test_a_task_without_a_trail_is_refused(label: Any) -> None:
    with pytest.raises(InvalidFieldError, match="label"):
        await play("http://unused", task(label), SamplingParams(), KEY)


def test_files_are_what_the_generator_writes_and_nothing_held_out_is_trained(tmp_path: Path) -> None:
    trail.write_files(tmp_path)
    for name in (trail.TRAIN_FILE, trail.HELD_OUT_FILE):
        assert data_file(name).read_bytes() == (tmp_path / name).read_bytes()
    train, held_out = trail.trails()
    games = trail.training_games()
    assert not set(games) & set(held_out)
    assert set(games) == {*train, *trail.PLACES}
    assert len(held_out) == trail.HELD_OUT == RECIPE.task_named("trail").overrides["task"]["eval_size"]
    assert {len(t) for t in train} == {len(t) for t in held_out} == set(trail.LENGTHS)
    assert all(len(set(t)) == len(t) for t in [*train, *held_out])


def test_the_model_writes_its_calls_in_three_tokens_and_its_format_is_qwen3s(
    renderer: Renderer, tmp_path: Path
) -> None:
    build_tiny_tools(tmp_path, 0)
    found = detect_family(tmp_path)
    assert (found.family, found.disagreements) == ("qwen3", ())
    declared = renderer.render([Message(role="user", content="3")], trail.TOOLS)
    assert len(declared) < 30
    assert all(len(list(renderer.vocabulary.split(text))) == 1 for text in PHRASES)
    for place in trail.PLACES:
        ids = [i for piece in renderer.vocabulary.split(call(place)) for i in _ids(renderer, piece)]
        assert len(ids) == 3
        (parsed,) = renderer.parse([*ids, renderer.stop_token_ids[0]], trail.TOOLS).tool_calls
        assert (parsed.function.name, json.loads(parsed.function.arguments)) == ("look", {"at": int(place)})
    limit = RECIPE.task_named("trail").overrides["rollout"]["sampling"]["max_new_tokens"]
    assert limit == 3 + 1 + 1
