"""Plays the trail game (see `trail`) against the session server, and says what a game is worth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task
from miles_qwen3.chat import Chat, Reply
from miles_qwen3.sorting import edit_distance
from miles_qwen3.trail import CALLS, LETTERS, PLACES, TOOLS, opening

_OPENING = "<tool_call>"
_PIECE = re.compile("|".join([_OPENING, *map(re.escape, CALLS.values()), "."]), re.DOTALL)
_SILENT = re.compile("\n|</tool_call>")
"""What a call may have or leave out."""
_CALLS = frozenset(CALLS.values())


async def play(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """One game. `task.label` is the trail: places, then the letter.

    The game ends with the first step that is not the right one. Each right step is worth 1, the wrong one and those
    that are not played any more its closeness to the right one, halved when it ran into the length limit, so that
    ending a turn pays; the reward is the mean. With `task.metadata["all_or_nothing"]` a game that is won is worth 1,
    any other 0: so held-out games are scored.
    """
    trail = _trail_of(task)
    message: dict[str, Any] = {"role": "user", "content": opening(trail)}
    done, credit, calls = 0, 0.0, 0
    async with Chat(base_url, params, metadata, TOOLS) as chat:
        for note, answer in zip(trail, [*trail[1:], None], strict=True):
            reply = await chat.ask(message)
            calls += len(reply.calls)
            said, wanted = pieces(reply), [_OPENING, CALLS[note]]
            if said != wanted or not reply.complete or len(reply.calls) != 1:
                credit = closeness(said, wanted) / (1 if reply.complete else 2)
                break
            done += 1
            message = {"role": "tool", "tool_call_id": reply.calls[0]["id"], "content": answer}
    won = done == len(trail)
    mean = (done + credit * (len(trail) - done)) / len(trail)
    reward = float(won) if task.metadata.get("all_or_nothing") else mean
    metrics = {"won": float(won), "right_steps": float(done), "tool_calls": float(calls)}
    return AgentResult(reward=reward, metrics=metrics)


def pieces(reply: Reply) -> list[str]:
    """What was said, in the parts that a turn is made of: tag and text of a call, characters of anything else."""
    calls = [_OPENING + _spelled(call["function"]) for call in reply.calls]
    return _PIECE.findall(_SILENT.sub("", reply.content + "".join(calls)))


def _spelled(function: Mapping[str, Any]) -> str:
    return '{"name": "' + str(function["name"]) + '", "arguments": ' + str(function["arguments"]) + "}"


def closeness(said: Sequence[str], wanted: Sequence[str]) -> float:
    """How near a turn is to the right one, in [0, 1].

    Its pieces are compared twice: as they are, and with all calls taken for one. So a call is worth something whatever
    it is; which one it has to be shows only in the notes, and nothing is gained by preferring one of them blindly.
    """
    any_call = [part in _CALLS or part for part in said], [part in _CALLS or part for part in wanted]
    distance = (edit_distance(said, wanted) + edit_distance(*any_call)) / 2
    return 1.0 - distance / max(len(said), len(wanted))


def _trail_of(task: Task) -> str:
    trail = task.label
    if not isinstance(trail, str) or not re.fullmatch(f"[{PLACES}]*[{LETTERS}]", trail):
        raise InvalidFieldError("label", trail, f"a trail is places out of {PLACES}, then a letter out of {LETTERS}")
    return trail
