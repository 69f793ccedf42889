"""Answers in OpenAI's form, whole or as a stream of server-sent events.

A stream ends only once its turn is committed. Pieces may have gone out before (see `live`); `rest` then gives what is
left. A stream that fails ends with an error and without `[DONE]`, and its turn is not in the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from miles_contracts import Message
from miles_rollout.session.errors import SessionError
from miles_rollout.session.live import Delta
from miles_rollout.session.nodes import Node
from miles_rollout.session.requests import SamplingFields

_ENCODER = msgspec.json.Encoder()
CHUNK_CHARS = 64
"""Longest piece of text or arguments in one event of a stream."""
DONE = b"data: [DONE]\n\n"


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A committed turn, ready to be written out.

    Attributes:
        session_id: the session.
        model: name the client used.
        node: the turn.
        prompt_tokens: length of the whole prompt.
        malformed: why calls were delivered as content.
        budget: tokens that the turn could have, where the context left fewer than were asked for.
        token_texts: text of each sampled token, only when log-probs were asked for.
        text: completions endpoint only, the decoded text.
    """

    session_id: str
    model: str
    node: Node
    prompt_tokens: int
    malformed: tuple[str, ...] = ()
    budget: int | None = None
    token_texts: tuple[str, ...] | None = None
    text: str | None = None

    @property
    def id(self) -> str:
        """Id of the completion."""
        return f"chatcmpl-{self.session_id[:8]}-{self.node.seq}"

    @property
    def finish_reason(self) -> str:
        """`length` whenever the turn is truncated, whatever else is in it."""
        if self.node.sampled.truncated:
            return "length"
        return "tool_calls" if self.node.reply is not None and self.node.reply.tool_calls else "stop"

    def usage(self) -> dict[str, Any]:
        """Token counts."""
        sampled = len(self.node.sampled.output_ids)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }
        if self.node.sampled.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.node.sampled.cached_tokens}
        return usage

    def extras(self) -> dict[str, Any]:
        """What we add to a choice: which turn it is, what could not be parsed, and a budget that was cut."""
        extras: dict[str, Any] = {"turn": self.node.seq, "parent": self.node.parent and self.node.parent.seq}
        if self.malformed:
            extras["malformed_tool_calls"] = list(self.malformed)
        if self.budget is not None:
            extras["max_tokens"] = self.budget
        return extras


def chat_body(answer: Answer) -> bytes:
    """The `chat.completion` object."""
    assert answer.node.reply is not None
    choice: dict[str, Any] = {
        "index": 0,
        "message": reply_dict(answer.node.reply),
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer),
        "miles": answer.extras(),
    }
    return _ENCODER.encode(_envelope(answer, "chat.completion") | {"choices": [choice], "usage": answer.usage()})


def completion_body(answer: Answer) -> bytes:
    """The `text_completion` object, with the sampled ids as `token_ids`."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": answer.text,
        "token_ids": answer.node.sampled.output_ids.tolist(),
        "finish_reason": answer.finish_reason,
        "logprobs": None,
        "miles": answer.extras(),
    }
    if answer.token_texts is not None:
        choice["logprobs"] = {
            "tokens": list(answer.token_texts),
            "token_logprobs": answer.node.sampled.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": _offsets(answer.token_texts),
        }
    body = _envelope(answer, "text_completion") | {"choices": [choice], "usage": answer.usage()}
    return _ENCODER.encode(body)


class ChatStream:
    """Writes the events of one streamed `chat.completion.chunk` sequence; all of them carry the same id.

    Args:
        completion_id: id of the completion.
        asked: the request.
    """

    def __init__(self, completion_id: str, asked: SamplingFields) -> None:
        self._head = _head(completion_id, "chat.completion.chunk", asked.model)
        self._include_usage = wants_usage(asked)
        if self._include_usage:
            self._head["usage"] = None
        self._begun = False
        self._content = 0
        self._reasoning = False

    def piece(self, delta: Delta) -> Iterator[bytes]:
        """Events of a piece of a turn that is not finished."""
        yield from self._begin("")
        yield from self._text("reasoning_content", delta.reasoning_content)
        yield from self._text("content", delta.content)
        self._content += len(delta.content)
        self._reasoning = self._reasoning or delta.reasoning_content is not None

    def rest(self, answer: Answer) -> Iterator[bytes]:
        """Events of what `piece` has not brought of a turn that is finished, `[DONE]` included."""
        reply = answer.node.reply
        assert reply is not None
        yield from self._begin("" if reply.content is not None else None)
        if not self._reasoning:
            yield from self._text("reasoning_content", reply.reasoning_content)
        yield from self._text("content", (reply.content or "")[self._content :])
        for index, call in enumerate(reply.tool_calls):
            named = {"name": call.function.name, "arguments": ""}
            yield self._event({"tool_calls": [{"index": index, "id": call.id, "type": call.type, "function": named}]})
            for piece in _pieces(call.function.arguments):
                yield self._event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield self._event({}, answer.finish_reason, logprobs=_logprobs(answer), miles=answer.extras())
        if self._include_usage:
            yield _event(self._head | {"choices": [], "usage": answer.usage()})
        yield DONE

    def _begin(self, content: str | None) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._event({"role": "assistant", "content": content})

    def _text(self, name: str, text: str | None) -> Iterator[bytes]:
        for piece in _pieces(text):
            yield self._event({name: piece})

    def _event(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None} | more
        return _event(self._head | {"choices": [choice]})


class TextStream:
    """Writes the events of one streamed `text_completion` sequence; all of them carry the same id.

    Args:
        completion_id: id of the completion.
        asked: the request.
    """

    def __init__(self, completion_id: str, asked: SamplingFields) -> None:
        self._head = _head(completion_id, "text_completion", asked.model)
        self._include_usage = wants_usage(asked)
        self._shown = 0

    def piece(self, delta: Delta) -> Iterator[bytes]:
        """Events of a piece of a turn that is not finished."""
        self._shown += len(delta.content)
        yield from self._text(delta.content)

    def rest(self, answer: Answer) -> Iterator[bytes]:
        """Events of what `piece` has not brought of a turn that is finished, `[DONE]` included."""
        yield from self._text((answer.text or "")[self._shown :])
        ids = answer.node.sampled.output_ids.tolist()
        yield self._event("", answer.finish_reason, token_ids=ids, miles=answer.extras())
        if self._include_usage:
            yield _event(self._head | {"choices": [], "usage": answer.usage()})
        yield DONE

    def _text(self, text: str) -> Iterator[bytes]:
        for piece in _pieces(text):
            yield self._event(piece)

    def _event(self, text: str, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None} | more
        return _event(self._head | {"choices": [choice]})


def wants_usage(asked: SamplingFields) -> bool:
    """Whether a stream is to end with a chunk of token counts."""
    return asked.stream_options is not None and asked.stream_options.include_usage


def error_event(error: SessionError) -> bytes:
    """The event that ends a stream whose turn failed."""
    return _event(error.to_dict())


def reply_dict(message: Message) -> dict[str, Any]:
    """An assistant message as clients get it."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content is not None:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls
        ]
    return out


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    return _head(answer.id, kind, answer.model)


def _head(completion_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


def _event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def _pieces(text: str | None) -> Iterator[str]:
    for start in range(0, len(text or ""), CHUNK_CHARS):
        yield (text or "")[start : start + CHUNK_CHARS]


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.token_texts is None:
        return None
    pairs = zip(answer.token_texts, answer.node.sampled.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
        ],
        "refusal": None,
    }


def _offsets(texts: tuple[str, ...]) -> list[int]:
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return offsets
