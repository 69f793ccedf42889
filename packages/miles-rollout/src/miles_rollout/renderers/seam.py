"""The seam between a history and what is appended to it: nothing may merge across it."""

from __future__ import annotations

from collections.abc import Sequence

from miles_contracts import InvalidFieldError, Message
from miles_rollout.renderers.errors import RenderRefusedError
from miles_rollout.renderers.vocabulary import Vocabulary


def check_history(messages: Sequence[Message], ids: Sequence[int]) -> None:
    """Refuses a history behind which nothing can be appended."""
    if not messages or messages[-1].role != "assistant":
        raise InvalidFieldError(
            "history_messages", messages[-1].role if messages else "nothing", "must end with an assistant turn"
        )
    if not len(ids):
        raise InvalidFieldError("history_ids", "nothing", "must hold the ids of the history")


def check_seam(
    vocabulary: Vocabulary, history: Sequence[int], suffix: Sequence[int], leading: str, *, message_index: int
) -> None:
    """Refuses a suffix whose first token would merge with the last of the history in a rendering of the whole.

    Nothing merges across an added token. Otherwise the plain text before the seam (back to the last added token) is
    encoded together with the plain text behind it; the tokens behind the seam must come out the same. The sampled ids
    before it need not be the canonical spelling of their text, so only their text is compared.
    """
    if not leading or not suffix or vocabulary.is_added(history[-1]):
        return
    start = len(history)
    while start > 0 and not vocabulary.is_added(history[start - 1]):
        start -= 1
    before = vocabulary.decode(history[start:])
    alone = vocabulary.encode(leading)
    joint = vocabulary.encode(before + leading, at_start=start == 0)
    kept = len(joint) - len(alone)
    if kept >= 0 and joint[kept:] == alone and vocabulary.decode(joint[:kept]) == before:
        return
    differs = next((i for i in range(1, min(len(joint), len(alone)) + 1) if joint[-i] != alone[-i]), len(alone) + 1)
    merged = joint[-differs] if differs <= len(joint) else None
    raise RenderRefusedError(
        "the tokenizer merges text across the end of the history",
        message_index=message_index,
        position=len(history) + max(len(alone) - differs, 0),
        token="" if merged is None else vocabulary.text_of(merged),
        remedy="use a family whose turns end with a control token, or start a new branch",
    )
