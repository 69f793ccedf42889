"""Requests of the OpenAI API: the fields that are read, and what they mean. All others are the business of `fields`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from miles_contracts import InvalidFieldError, SamplingParams, SamplingTransform
from miles_rollout.session.errors import BadRequestError, ContextLengthError
from miles_rollout.session.fields import unread_fields
from miles_rollout.session.matching import Repair
from miles_rollout.session.messages import shorten
from miles_rollout.session.nodes import Tools
from miles_rollout.session.tree import Policy
from miles_rollout.session.wrong_type import refused

T = TypeVar("T")
R = TypeVar("R", "ChatRequest", "CompletionRequest")
Count = Annotated[int, msgspec.Meta(le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Whole numbers that engines take."""
NOTHING = msgspec.Raw(b"null")
"""A field that the client left out."""


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share."""

    model: str = ""
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    max_tokens: Count | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of `/v1/chat/completions`. Messages and tools stay as text until it is known what is new in them."""

    messages: msgspec.Raw
    tools: msgspec.Raw = NOTHING
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of `/v1/completions`: the prompt is token ids."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None


class OpenRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /sessions`; everything is optional.

    Attributes:
        policy: linear or branching, by default the server's.
        sampling: pins how all turns are sampled; a request's own settings then give way (and are counted),
            except `stop`, `seed` and a smaller budget.
        thinking: True or False switches the family's reasoning on or off, None leaves its default.
        reasoning_effort: for families that know it.
        prompt_index, member, attempt: identity of the trajectories.
        metadata: kept with the session, given back with it.
    """

    policy: Policy | None = None
    sampling: SamplingParams | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    repairs: frozenset[Repair] | None = None
    prompt_index: int = 0
    member: int = 0
    attempt: int = 0
    metadata: dict[str, Any] = {}


class _Pinned(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling that a session pins: a misspelt setting is refused, or all turns would be sampled otherwise."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 128
    stop_token_ids: tuple[TokenId, ...] = ()
    seed: Seed | None = None


class OpenBody(OpenRequest, kw_only=True, forbid_unknown_fields=True):
    """An `OpenRequest` off the wire."""

    sampling: _Pinned | None = None


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a request body.

    Raises:
        BadRequestError: not JSON, or a field of the wrong type (named in the message).
    """
    return _decode(lambda: decoder.decode(body))


def _decode(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidFieldError) as error:
        raise refused(error) from error


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LONG = ("messages", "tools")
"""Fields that are kept as text; a request is gone through once, whatever its length."""


def read_request(body: bytes, kind: type[R]) -> tuple[R, tuple[str, ...]]:
    """Read a turn's request.

    Returns:
        The request, and the names of fields that nothing is known about.

    Raises:
        BadRequestError: not a JSON object, a field of the wrong type, or one that cannot be honoured.
    """
    fields = decode_body(body, _FIELDS)
    names = kind.__struct_fields__
    unknown = unread_fields(fields, names)
    short = {name: NOTHING if name in _LONG else fields[name] for name in names if name in fields}
    request = _decode(lambda: msgspec.json.decode(msgspec.json.encode(short), type=kind))
    for name in _LONG:
        if name in short:
            setattr(request, name, fields[name])
    if isinstance(request, ChatRequest) and request.parallel_tool_calls is False and bytes(request.tools) != b"null":
        raise BadRequestError(
            "parallel_tool_calls: got False; nothing keeps the policy from calling several tools in one turn, leave it "
            "out and run the calls one after another",
            param="parallel_tool_calls",
        )
    return request, unknown


def parse_tools(raw: bytes) -> Tools:
    """Decode the tools of a request.

    Raises:
        BadRequestError: not an array of OpenAI function tools with names.
    """
    try:
        tools = msgspec.json.decode(raw, type=list[dict[str, Any]] | None)
    except msgspec.ValidationError as error:
        raise refused(error, root="tools") from error
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise BadRequestError(
                f"tools[{i}]: only tools of type 'function' with a 'function' object are known", param=f"tools[{i}]"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequestError(f"tools[{i}].function.name: give a name", param=f"tools[{i}].function.name")
    return tuple(tools or ())


class ForcedChoice(msgspec.Struct, frozen=True):
    """A tool choice that leaves no choice.

    Attributes:
        name: the tool that must be called, None for any.
    """

    name: str | None


def forced_choice(choice: str | dict[str, Any] | None, tools: Tools) -> ForcedChoice | None:
    """What "required" or a named function asks for; None when the policy may choose.

    Raises:
        BadRequestError: something else than OpenAI's choices, or a tool that the request does not bring.
    """
    if choice is None or choice in ("auto", "none"):
        return None
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise BadRequestError(
            f"tool_choice: got {shorten(choice)}; use 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": NAME}}',
            param="tool_choice",
        )
    known = [tool["function"]["name"] for tool in tools]
    if not known:
        raise BadRequestError("tool_choice: it forces a call, but the request brings no tools", param="tools")
    if name is not None and name not in known:
        raise BadRequestError(
            f"tool_choice: {name!r} is none of the request's tools ({shorten(known)})", param="tool_choice"
        )
    return ForcedChoice(name)


_TRANSFORM = ("temperature", "top_p", "top_k", "min_p")


def resolve_sampling(
    request: SamplingFields,
    *,
    pinned: SamplingParams | None,
    fixed: SamplingTransform | None,
    default_max_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> tuple[SamplingParams, bool]:
    """How this turn is sampled, before its budget is cut to the context.

    Args:
        request: the request.
        pinned: the session's settings, which win over the request's.
        fixed: the transform of the session's first turn, when nothing is pinned; log-probs of one trajectory
            are all of one transform.
        default_max_tokens: budget where neither request nor session says.
        stop_token_ids: the family's ends of a turn.

    Returns:
        The parameters, and whether a setting of the request had to give way.

    Raises:
        BadRequestError: a value out of range, or a transform that differs from `fixed`.
    """
    asked = {f: v for f in _TRANSFORM if (v := getattr(request, f)) is not None}
    base: SamplingTransform | None = pinned.transform if pinned is not None else fixed
    overridden = base is not None and any(getattr(base, f) != v for f, v in asked.items())
    if overridden and pinned is None:
        name = next(f for f, v in asked.items() if getattr(base, f) != v)
        raise BadRequestError(
            f"{name}: got {asked[name]}, the session's first turn was sampled with {getattr(base, name)}; "
            "all turns of a session are sampled alike, use another session or pin the session's sampling",
            param=name,
        )
    values = asked if base is None else {f: getattr(base, f) for f in _TRANSFORM}
    budget = max_tokens_of(request)
    if budget is not None and budget < 1:
        newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        name = "max_completion_tokens" if newer else "max_tokens"
        raise BadRequestError(f"{name}: got {budget}; use a value >= 1", param=name)
    if pinned is not None:
        budget = pinned.max_new_tokens if budget is None else min(budget, pinned.max_new_tokens)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(not s for s in stop):
        raise BadRequestError("stop: a stop string is not empty", param="stop")
    own_ids = (*(request.stop_token_ids or ()), *(pinned.stop_token_ids if pinned else ()))
    params = SamplingParams(
        max_new_tokens=budget if budget is not None else default_max_tokens,
        stop=(*stop, *(pinned.stop if pinned else ())),
        stop_token_ids=tuple(dict.fromkeys((*own_ids, *stop_token_ids))),
        ignore_eos=request.ignore_eos or bool(pinned and pinned.ignore_eos),
        seed=request.seed if request.seed is not None or pinned is None else pinned.seed,
        **values,
    )
    try:
        _ = params.transform
    except InvalidFieldError as error:
        name = error.field.rpartition(".")[2]
        raise BadRequestError(f"{name}: got {error.value!r}; {error.remedy}", param=name) from error
    return params, overridden


def max_tokens_of(request: SamplingFields) -> int | None:
    """The budget a request names, under either of its two names."""
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return newer if newer is not None else request.max_tokens


def fit_context(
    params: SamplingParams, prompt_tokens: int, max_context_tokens: int | None, field: str
) -> SamplingParams:
    """Cut the budget to what the context leaves; `field` of the request holds the prompt.

    Raises:
        ContextLengthError: it leaves nothing.
    """
    if max_context_tokens is None:
        return params
    room = max_context_tokens - prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"this model's maximum context length is {max_context_tokens} tokens, and the prompt has {prompt_tokens}; "
            "end the episode, or compact the history in a branching session",
            param=field,
        )
    if room >= params.max_new_tokens:
        return params
    return msgspec.structs.replace(params, max_new_tokens=room)
