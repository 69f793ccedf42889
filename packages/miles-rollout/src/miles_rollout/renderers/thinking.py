"""Reasoning of an assistant message, wherever the sender put it."""

from __future__ import annotations

from miles_contracts import Message


def split_reasoning(message: Message, opening: str = "<think>", closing: str = "</think>") -> tuple[str, str]:
    """Reasoning and answer of an assistant message; tags inside `content` count when the field is absent."""
    content = message.content or ""
    if message.reasoning_content is not None:
        return message.reasoning_content, content
    if closing not in content:
        return "", content
    before, _, after = content.partition(closing)
    return before.rpartition(opening)[2].strip("\n"), after.lstrip("\n")
