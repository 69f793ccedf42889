"""The game, played by scripted players over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_contracts import InvalidFieldError, Message, SamplingParams, Task
from miles_qwen3 import RECIPE, guessing
from miles_qwen3.sorting import data_file

Player = Callable[[list[dict[str, str]]], str]


@asynccontextmanager
async def server(player: Player, finish: str = "stop") -> AsyncIterator[tuple[str, list[Any]]]:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append((request.headers["Authorization"], body))
        message = {"role": "assistant", "content": player(body["messages"])}
        return web.json_response({"choices": [{"finish_reason": finish, "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as running:
        yield str(running.make_url("/v1")), seen


def task(label: Any) -> Task:
    return Task(prompt_index=0, messages=(Message(role="user", content="0-9?"),), label=label)


def halving(messages: list[dict[str, str]]) -> str:
    low, high = 0, 9
    for guess, told in zip(messages[1::2], messages[2::2], strict=True):
        if told["content"] == "+":
            low = int(guess["content"]) + 1
        else:
            high = int(guess["content"]) - 1
    return str((low + high) // 2)


@pytest.mark.parametrize("hidden", range(10))
async def test_halving_always_finds_the_digit(hidden: int) -> None:
    async with server(halving) as (url, seen):
        result = await guessing.play(url, task(hidden), SamplingParams(max_new_tokens=3), {"api_key": "k"})
    assert result.metrics["found"] == 1.0
    assert result.reward == pytest.approx(1.0 - 0.1 * (len(seen) - 1))
    assert {header for header, _ in seen} == {"Bearer k"}
    assert seen[0][1]["messages"] == [{"role": "user", "content": "0-9?"}]
    assert all(body["max_tokens"] == 3 for _, body in seen)


async def test_a_stubborn_player_loses_after_four_guesses() -> None:
    async with server(lambda _: "9") as (url, seen):
        result = await guessing.play(url, task(0), SamplingParams(), {"api_key": "none"})
    assert len(seen) == guessing.GUESSES
    assert result.reward == 0.0
    assert result.metrics == {"found": 0.0, "guesses": 4.0, "illegal": 0.0}


@pytest.mark.parametrize("text", ["", "a", "²"])
async def test_a_first_turn_without_a_guess_ends_the_game_without_reward(text: str) -> None:
    async with server(lambda _: text) as (url, seen):
        result = await guessing.play(url, task(5), SamplingParams(), {"api_key": "none"})
    assert (len(seen), result.reward, result.metrics["illegal"]) == (1, 0.0, 1.0)


@pytest.mark.parametrize("text", ["5", " 5", "5!", "57", "x5"])
async def test_the_first_digit_is_the_guess(text: str) -> None:
    async with server(lambda _: text) as (url, _):
        result = await guessing.play(url, task(5), SamplingParams(), {"api_key": "none"})
    assert result.reward == 1.0


@pytest.mark.parametrize(("text", "reward"), [("5", 0.1), ("8", 0.1 * (1 - 3 / 9)), ("x", 0.0)])
async def test_a_turn_at_its_length_limit_ends_the_game_with_a_little_credit(text: str, reward: float) -> None:
    async with server(lambda _: text, finish="length") as (url, seen):
        result = await guessing.play(url, task(5), SamplingParams(), {"api_key": "none"})
    assert (len(seen), result.reward, result.metrics["found"]) == (1, pytest.approx(reward), 0.0)


def test_a_guess_that_was_taken_counts_more_than_a_later_one_that_ran_on() -> None:
    assert guessing.reward_of(5, 3, 1, stray=5) == guessing.reward_of(5, 3, 1) > guessing.reward_of(5, None, 0, stray=5)


@pytest.mark.parametrize("label", [None, "5", 10, -1])
async def test_a_task_without_a_digit_is_refused(label: Any) -> None:
    with pytest.raises(InvalidFieldError, match="label"):
        await guessing.play("http://unused", task(label), SamplingParams(), {"api_key": "none"})


def test_every_found_digit_beats_every_lost_game() -> None:
    found = [guessing.reward_of(3, 3, n) for n in range(1, guessing.GUESSES + 1)]
    lost = [guessing.reward_of(3, last, guessing.GUESSES) for last in range(10) if last != 3]
    assert min(found) > max(lost)
    assert found == sorted(found, reverse=True)


def test_files_are_what_the_generator_writes() -> None:
    train, held_out = guessing.ranges()
    assert data_file(guessing.TRAIN_FILE).read_text() == guessing.lines(train)
    assert data_file(guessing.HELD_OUT_FILE).read_text() == guessing.lines(held_out)


def test_no_held_out_range_is_trained() -> None:
    train, held_out = guessing.ranges()
    assert not {opening for opening, _ in guessing.problems(train)} & {o for o, _ in guessing.problems(held_out)}
    assert len(guessing.problems(held_out)) == RECIPE.task_named("guess").overrides["task"]["eval_size"]
