"""What a request becomes before the engine sees it: rendered ids, render options, a seed; and what a client sees."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError, ToolCall
from miles_rollout.renderers import CallOpeningError, ForcedCall, Renderer, RenderError
from miles_rollout.session.errors import BadRequestError, RenderRefusedError
from miles_rollout.session.requests import ChatRequest, CompletionRequest, ForcedChoice
from miles_rollout.session.session import RenderChoice
from miles_rollout.session.tree import Plan


def prompt_of(request: CompletionRequest, vocab_size: int) -> NDArray[np.int32]:
    """The prompt of a text completion, int32 [T].

    Raises:
        BadRequestError: it is not one list of ids below `vocab_size`.
    """
    prompt: Any = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not all(isinstance(i, int) for i in prompt):
        raise BadRequestError("prompt: send token ids (one list of integers), text has no exact ids", param="prompt")
    bad = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise BadRequestError(f"prompt: token id {bad} leaves [0, {vocab_size})", param="prompt")
    return np.asarray(prompt, dtype=np.int32)


def render_prompt(
    renderer: Renderer, plan: Plan, history: Sequence[int], forced: ForcedChoice | None = None
) -> ForcedCall:
    """The ids that are new in a prompt, and those of them that open a forced call (none without one).

    Args:
        renderer: of the model's family.
        plan: what the request continues.
        history: the stored ids of that.
        forced: the call that must come.

    Raises:
        RenderRefusedError: the renderer cannot append these messages exactly.
        CallOpeningError: it can, but not the opening of such a call.
        BadRequestError: a role or field that no renderer takes.
    """
    messages = plan.history_messages()
    try:
        if forced is not None:
            return renderer.render_call(messages, history, plan.appended, plan.tools, forced.name)
        if plan.parent is None:
            return ForcedCall(ids=renderer.render(plan.appended, plan.tools), opening=[])
        return ForcedCall(ids=renderer.render_suffix(messages, history, plan.appended, plan.tools), opening=[])
    except CallOpeningError:
        raise
    except RenderError as error:
        raise RenderRefusedError(str(error), param="messages") from error
    except InvalidFieldError as error:
        raise BadRequestError(str(error), param=error.field) from error


def other_calls(forced: ForcedChoice | None, prompt: ForcedCall, calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """What to tell about a forced call that became another one: some families leave the end of the name to the policy.

    Args:
        forced: what the request forces.
        prompt: how its call was opened, if it was.
        calls: what the answer calls.
    """
    if forced is None or forced.name is None or not prompt.opening or not calls:
        return ()
    called = calls[0].function.name
    return () if called == forced.name else (f"the call of {forced.name!r} became one of {called!r}",)


def render_choice(request: ChatRequest) -> RenderChoice:
    """The render options that a request names.

    Raises:
        BadRequestError: an option that is not known.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    thinking = kwargs.pop("enable_thinking", kwargs.pop("thinking", None))
    effort = kwargs.pop("reasoning_effort", request.reasoning_effort)
    if kwargs:
        raise BadRequestError(
            f"chat_template_kwargs: {sorted(kwargs)[0]!r} is not known; use enable_thinking or reasoning_effort",
            param="chat_template_kwargs",
        )
    if thinking is not None and not isinstance(thinking, bool):
        raise BadRequestError("chat_template_kwargs.enable_thinking: use true or false", param="chat_template_kwargs")
    return RenderChoice(thinking=thinking, reasoning_effort=effort)


def cut_at_stop(text: str, stop: tuple[str, ...], start: int = 0) -> str:
    """Text before the first stop string at or behind `start`: the view that OpenAI's clients expect; the tokens keep
    it."""
    ends = [at for s in stop if (at := text.find(s, start)) >= 0]
    return text[: min(ends)] if ends else text


def turn_seed(seed: int, turn: int) -> int:
    """A seed in [0, 2**31) for one turn of an episode."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33
