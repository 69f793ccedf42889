"""Turns in which reasoning stands between two tags, followed by the answer and the calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles_rollout.parsers.calls import CallFormat
from miles_rollout.parsers.message import CallId, ParsedMessage, Progress, Tools, text_before


@dataclass(frozen=True, kw_only=True)
class TaggedSyntax:
    """`<think>reasoning</think>answer calls`, with the tags and the call format of a family.

    Attributes:
        opening: tag that begins reasoning, or None for a family that does not reason.
        closing: tag that ends it.
        begins_inside: the generation prompt has already opened the reasoning.
        calls: the family's tool calls, or None.
        strip: characters taken off both ends of reasoning and off the start of the answer.
    """

    opening: str | None = "<think>"
    closing: str = "</think>"
    begins_inside: bool = False
    calls: CallFormat | None = None
    strip: str = "\n"

    def parse(self, text: str, tools: Tools, call_id: CallId) -> ParsedMessage:
        """See `CompletionSyntax.parse`. Reasoning that never ends is reasoning; it is not the answer."""
        reasoning, rest = self.split(text)
        if self.calls is None:
            return ParsedMessage(content=rest, reasoning_content=reasoning)
        found = self.calls.parse(rest, tools, call_id)
        return ParsedMessage(
            content=found.content,
            reasoning_content=reasoning,
            tool_calls=found.tool_calls,
            malformed=found.malformed,
        )

    def so_far(self, text: str) -> Progress:
        """See `CompletionSyntax.so_far`.

        One reading is taken for granted: a turn that begins without reasoning does not close any later on.
        """
        if self.opening is not None:
            body = text.lstrip()
            if self.opening.startswith(body):
                return Progress()  # the tag itself may still be under way
            inside = self.begins_inside or body.startswith(self.opening)
            if inside and self.closing not in body:
                return Progress()
        reasoning, rest = self.split(text)
        return Progress(content=self._content_so_far(rest), reasoning_content=reasoning)

    def _content_so_far(self, rest: str) -> str:
        """The part of the answer that no call can change any more."""
        tags = [self.closing] if self.opening is not None else []
        if self.calls is None:
            return text_before(rest, tags)
        # Formats of control tokens have several that may open a call; line ends next to a call go with it.
        opening = self.calls.opening
        known = text_before(rest, [*tags, "<|" if opening.startswith("<|") else opening]).rstrip("\n")
        return known if known.strip() and not known.startswith("\n") else ""

    def without_calls(self) -> TaggedSyntax:
        """See `CompletionSyntax.without_calls`."""
        return replace(self, calls=None)

    def without_reasoning(self) -> TaggedSyntax:
        """See `CompletionSyntax.without_reasoning`."""
        return replace(self, opening=None)

    def split(self, text: str) -> tuple[str | None, str]:
        """Reasoning (None when there is none) and the rest."""
        if self.opening is None:
            return None, text
        body = text.lstrip()
        if body.startswith(self.opening):
            body = body[len(self.opening) :]
        elif self.begins_inside or self.closing in text.partition(self.opening)[0]:
            body = text  # opened in the prompt
        else:
            return None, text
        reasoning, closed, rest = body.partition(self.closing)
        if not closed and self.calls is not None and self.calls.opening in reasoning:
            # Some models go from thinking straight to a call; the call ends the reasoning.
            reasoning, tag, rest = reasoning.partition(self.calls.opening)
            rest = tag + rest
        return (reasoning.strip(self.strip) or None), rest.lstrip(self.strip)
