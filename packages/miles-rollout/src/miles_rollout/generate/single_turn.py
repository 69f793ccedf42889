"""The default way to generate: one prompt, one answer, one reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from miles_contracts import (
    Generate,
    InvalidFieldError,
    Renderer,
    Reward,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    TrajectoryIdentity,
)
from miles_rollout.generate.trajectories import derive_seed, single_generation
from miles_rollout.rewards.base import score
from miles_rollout.router import Router
from miles_rollout.tasks import TaskSource


class PromptTooLongError(InvalidFieldError):
    """A prompt leaves no room for an answer."""


def single_turn(
    *,
    renderer: Renderer,
    router: Router,
    reward: Reward | None,
    sampling: SamplingParams,
    run_seed: int,
    max_tokens: int | None = None,
    reward_timeout_s: float | None = 60.0,
    routing: bool = False,
    num_experts: int | None = None,
    keep_text: bool = True,
    session: str = "prompt",
    siblings: int = 8,
) -> Generate:
    """A Generate that asks the router once and scores the answer.

    Args:
        renderer: renders the messages and decodes the answer.
        router: samples. `siblings` members of a group share a key, so that they share their prompt's cache.
        reward: None leaves trajectories unscored (for a group reward).
        sampling: its `seed` is replaced by one derived from run, prompt, member and attempt.
        run_seed: see `derive_seed`.
        max_tokens: bound of prompt plus answer; the answer is cut to what the prompt leaves. None for no bound.
        reward_timeout_s: seconds for an asynchronous reward.
        routing: ask the engine for its expert choices; needs `num_experts`.
        num_experts: experts per layer of the served model.
        keep_text: put the decoded answer into `metadata["response"]`, for people.
        session: prefix of the router's session keys; give evaluation its own.
        siblings: members of a group that go to the same engine; more would leave other engines idle.

    A trajectory whose reward fails is FAILED with the reason. The engine's errors are raised.
    """
    if routing and num_experts is None:
        raise InvalidFieldError("num_experts", None, "routing needs the number of experts of the model")
    if max_tokens is not None and max_tokens < 2:
        raise InvalidFieldError("max_tokens", max_tokens, "leave room for a prompt and an answer")
    if siblings < 1:
        raise InvalidFieldError("siblings", siblings, "use a value >= 1")
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids)))
    last: tuple[Task | None, Sequence[int]] = (None, ())

    async def generate(task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        nonlocal last
        if last[0] is not task:  # the members of a group begin one after the other
            last = (task, renderer.render(task.messages, add_generation_prompt=True))
        prompt_ids = last[1]
        params = msgspec.structs.replace(
            sampling,
            max_new_tokens=answer_room(task, len(prompt_ids), sampling.max_new_tokens, max_tokens),
            stop_token_ids=stops,
            seed=derive_seed(run_seed, task.prompt_index, member, attempt),
        )
        result = await router.generate(
            f"{session}-{task.prompt_index}-{member // siblings}", prompt_ids, params, routing=routing
        )
        trajectory = single_generation(
            identity=TrajectoryIdentity(prompt_index=task.prompt_index, member=member, attempt=attempt),
            prompt_ids=prompt_ids,
            result=result,
            params=params,
            num_experts=num_experts if routing else None,
        )
        text = renderer.decode([int(i) for i in result.output_ids])
        known: dict[str, Any] = {"metadata": {"response": text}} if keep_text else {}
        if reward is not None and trajectory.status is not Status.ABORTED:
            outcome = await score(reward, task, text, timeout_s=reward_timeout_s)
            failed = {"status": Status.FAILED, "error": outcome.error}
            known |= {"reward": outcome.value} if outcome.error is None else failed
        return [trajectory.replace(**known)]

    return generate


def answer_room(task: Task, prompt_tokens: int, max_new_tokens: int, max_tokens: int | None) -> int:
    """Tokens the answer may have after a prompt of `prompt_tokens`.

    Raises:
        PromptTooLongError: none.
    """
    if not prompt_tokens:
        raise PromptTooLongError("prompt", "", f"prompt {task.prompt_index} of {task.source!r} rendered to no tokens")
    if max_tokens is None:
        return max_new_tokens
    room = max_tokens - prompt_tokens
    if room < 1:
        raise PromptTooLongError(
            "max_tokens",
            max_tokens,
            f"prompt {task.prompt_index} of {task.source!r} alone has {prompt_tokens} tokens; "
            "raise the limit or leave such prompts out",
        )
    return min(room, max_new_tokens)


def check_prompt_lengths(source: TaskSource, renderer: Renderer, *, max_tokens: int, limit: int = 512) -> int:
    """Render the first `limit` tasks of the stream and return the length of the longest, before anything is started.

    Raises:
        PromptTooLongError: a prompt leaves no room for an answer; the first such is named.
    """
    longest = 0
    for index in range(min(limit, source.size)):
        task = source.at(index)
        length = len(renderer.render(task.messages, add_generation_prompt=True))
        answer_room(task, length, 1, max_tokens)
        longest = max(longest, length)
    return longest
