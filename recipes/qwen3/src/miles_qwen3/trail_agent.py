"""Plays the trail game (see `trail`) against the session server, and says what a game is worth."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task
from miles_qwen3.chat import Chat, Reply
from miles_qwen3.tokenizer import SPECIAL
from miles_qwen3.trail import AFTER, BEFORE, PLACES, TOOLS, opening

WRONG_TURN = 0.8
"""Most that a turn is worth that is not the right one."""
END = "end of turn"
_CONTROL = re.compile(f"(?:{'|'.join(map(re.escape, SPECIAL))})$")
_PIECE = re.compile("|".join([*map(re.escape, (BEFORE, AFTER)), "."]), re.DOTALL)


async def play(base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]) -> AgentResult:
    """One game. `task.label` is the trail, the places in the order in which they have to be looked at.

    The game ends with the first turn that is not the right call alone. Each right turn is worth 1, the wrong one and
    those that are not played any more `closeness` of the wrong one; the reward is the mean. With
    `task.metadata["all_or_nothing"]` a game that is won is worth 1, any other 0: so held-out games are scored.
    """
    trail = _trail_of(task)
    message: dict[str, Any] = {"role": "user", "content": opening(trail)}
    done, credit, calls = 0, 0.0, 0
    async with Chat(base_url, params, metadata, TOOLS, logprobs=True) as chat:
        for place, note in zip(trail, [*trail[1:], ""], strict=True):
            reply = await chat.ask(message)
            calls += len(reply.calls)
            if not _is_right(reply, place):
                credit = closeness(pieces(reply), [BEFORE, place, AFTER, END])
                break
            done += 1
            message = {"role": "tool", "tool_call_id": reply.calls[0]["id"], "content": note}
    won = done == len(trail)
    mean = (done + credit * (len(trail) - done)) / len(trail)
    reward = float(won) if task.metadata.get("all_or_nothing") else mean
    metrics = {"won": float(won), "right_turns": float(done), "tool_calls": float(calls)}
    return AgentResult(reward=reward, metrics=metrics)


def _is_right(reply: Reply, place: str) -> bool:
    """Whether a turn is one call of the tool at `place`, with nothing around it."""
    if len(reply.calls) != 1 or reply.content or not reply.complete:
        return False
    function = reply.calls[0]["function"]
    return (function["name"], json.loads(function["arguments"])) == ("look", {"at": int(place)})


def pieces(reply: Reply) -> list[str]:
    """What was written, in the parts that a right turn is made of; characters of anything else."""
    text = _CONTROL.sub("", reply.written)
    return _PIECE.findall(text) + [END] * reply.complete


def closeness(said: Sequence[str], wanted: Sequence[str]) -> float:
    """How near a wrong turn is to the right one, in [0, `WRONG_TURN`].

    Half of it for the pieces that stand where they belong, so that nothing is gained by writing anything before them;
    half for those that come in the right order wherever they stand, so that a policy that starts at random can come
    upon one after the other. The end counts only where it belongs: it would be the first to be learnt, and an early
    end leaves nothing to come upon.
    """
    in_place = sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)
    body = [part for part in wanted if part != END]
    return WRONG_TURN * (in_place + in_order(said, body) / len(body)) / 2


def in_order(said: Sequence[str], wanted: Sequence[str]) -> int:
    """Most items of `wanted` that `said` has in the same order (longest common subsequence)."""
    row = [0] * (len(wanted) + 1)
    for part in said:
        previous, row = row, [0]
        for j, other in enumerate(wanted):
            row.append(previous[j] + 1 if part == other else max(row[j], previous[j + 1]))
    return row[-1]


def _trail_of(task: Task) -> str:
    trail = task.label
    if not isinstance(trail, str) or not re.fullmatch(f"[{PLACES}]+", trail):
        raise InvalidFieldError("label", trail, f"a trail is one or more places out of {PLACES}")
    return trail
