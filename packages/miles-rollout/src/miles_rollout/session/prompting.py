"""What a request becomes before the engine sees it: rendered ids, render options, a seed; and what a client sees."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_contracts import InvalidFieldError
from miles_rollout.renderers import Renderer, RenderError
from miles_rollout.session.errors import BadRequestError, RenderRefusedError
from miles_rollout.session.requests import ChatRequest, CompletionRequest
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


def render_prompt(renderer: Renderer, plan: Plan, history: Sequence[int]) -> list[int]:
    """The ids that are new in a prompt; `history` are the stored ids of what the plan continues.

    Raises:
        RenderRefusedError: the renderer cannot append these messages exactly.
        BadRequestError: a role or field that no renderer takes.
    """
    try:
        if plan.parent is None:
            return renderer.render(plan.appended, plan.tools)
        return renderer.render_suffix(plan.history_messages(), history, plan.appended, plan.tools)
    except RenderError as error:
        raise RenderRefusedError(str(error), param="messages") from error
    except InvalidFieldError as error:
        raise BadRequestError(str(error), param=error.field) from error


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


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Text before the first stop string: the view that OpenAI's clients expect; the tokens keep it."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def turn_seed(seed: int, turn: int) -> int:
    """A seed in [0, 2**31) for one turn of an episode."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33
