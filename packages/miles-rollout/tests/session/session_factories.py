"""A tiny tokenizer, a scripted engine, and short ways to make messages and generations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from miles_contracts import (
    FunctionCall,
    GenerateResult,
    Message,
    SamplingParams,
    ToolCall,
    VersionSpan,
)
from miles_rollout.session.nodes import Generation

ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def write_tokenizer(folder: Path, added: Sequence[str] = ADDED[:3]) -> None:
    """A byte-level tokenizer with a few merges and Qwen's control tokens (or others): ids 0-255 are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("u", "s"), ("us", "er"), ("e", "r"), ("i", "n")]
    known = []
    for left, right in merges:
        if left in vocabulary and right in vocabulary:
            vocabulary.setdefault(left + right, len(vocabulary))
            known.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=known))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(added))
    tokenizer.add_tokens(list(ADDED[3:]))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str, call_id: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def assistant(text: str | None = "", *, reasoning: str | None = None, calls: Sequence[ToolCall] = ()) -> Message:
    return Message(role="assistant", content=text, reasoning_content=reasoning, tool_calls=tuple(calls))


def call(name: str, arguments: str, call_id: str) -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


def generation(
    ids: Sequence[int], request_id: str, *, truncated: bool = False, version: int | None = 0, routing: Any = None
) -> Generation:
    n = len(ids)
    return Generation(
        output_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.linspace(-0.5, -2.0, n, dtype=np.float32) if n else np.empty(0, np.float32),
        version_spans=(VersionSpan(start=0, end=n, version=version),) if n else (),
        finish_reason="length" if truncated else "stop",
        truncated=truncated,
        request_id=request_id,
        routing=routing,
    )


Reply = str | list[int] | Exception | GenerateResult | Callable[[list[int], SamplingParams], Any]


class ScriptedEngine:
    """An engine that answers from a list (or a function), and keeps everything it was asked and said.

    A str is encoded and closed with `<|im_end|>`; a list is ids as they are; an exception is raised.
    """

    def __init__(self, renderer: Any, replies: Sequence[Reply] = (), *, default: Reply = "ok") -> None:
        self.renderer = renderer
        self.replies = list(replies)
        self.default = default
        self.calls: list[tuple[list[int], SamplingParams]] = []
        self.said: dict[str, tuple[list[int], list[int], list[float]]] = {}
        self.aborted: list[str | None] = []
        self.gate: asyncio.Event | None = None
        self.version: int | None = 3
        self.experts: tuple[int, int, int] | None = None
        self.cached: int | None = None

    @property
    def url(self) -> str:
        return "scripted"

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = []
        vocabulary = self.renderer.vocabulary
        while text:
            at, token = min(
                ((text.find(t), t) for t in ADDED if text.find(t) >= 0), default=(len(text), None), key=lambda p: p[0]
            )
            ids += vocabulary.encode(text[:at]) if at else []
            if token is None:
                break
            ids.append(vocabulary.id(token))
            text = text[at + len(token) :]
        return ids

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        routing: bool = False,
        routing_start: int = 0,
    ) -> GenerateResult:
        self.calls.append((list(input_ids), params))
        reply: Any = self.replies.pop(0) if self.replies else self.default
        if self.gate is not None:
            await self.gate.wait()
        if callable(reply):
            reply = reply(list(input_ids), params)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, GenerateResult):
            return reply
        finish = "stop"
        if isinstance(reply, str):
            reply = [*self.ids_of(reply), self.renderer.vocabulary.id("<|im_end|>")]
        if len(reply) > params.max_new_tokens:
            reply, finish = reply[: params.max_new_tokens], "length"
        n = len(reply)
        logprobs = [-(0.25 + 0.5 * ((i * 7 + len(input_ids)) % 11)) for i in range(n)]
        assert request_id is not None
        self.said[request_id] = (list(input_ids), list(reply), logprobs)
        rows = None
        if routing and self.experts is not None:
            layers, top_k, experts = self.experts
            fed = np.asarray([*input_ids, *reply][:-1], dtype=np.int64)
            rows = (fed[:, None, None] + np.arange(layers * top_k).reshape(layers, top_k))[routing_start:] % experts
        return GenerateResult(
            output_ids=np.asarray(reply, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            version_spans=(VersionSpan(start=0, end=n, version=self.version),) if n else (),
            finish_reason=finish,
            cached_tokens=self.cached,
            routing=rows,
            request_id=request_id,
        )

    async def abort(self, request_id: str | None = None) -> None:
        self.aborted.append(request_id)

    async def begin_weight_update(self, update_id: str, manifest: Any) -> None:
        raise NotImplementedError

    async def healthy(self) -> bool:
        return True

    async def weight_version(self) -> int | None:
        return self.version


def as_json(messages: Sequence[Message | dict[str, Any]]) -> list[dict[str, Any]]:
    return [m.to_dict() if isinstance(m, Message) else m for m in messages]


def body(messages: Sequence[Message | dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": as_json(messages), **fields}).encode()
