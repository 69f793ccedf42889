"""The checks: what must hold of a renderer on a conversation for its tokens to be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from miles_contracts import FunctionCall, Message, ToolCall
from miles_rollout.parsers import TaggedSyntax
from miles_rollout.renderers.errors import CallOpeningError, RenderError, RenderRefusedError
from miles_rollout.renderers.forced import ForcedCall
from miles_rollout.renderers.protocol import Renderer
from miles_rollout.renderers.verify.controls import CONTROLS
from miles_rollout.renderers.verify.conversations import Conversation, random_conversations, standard_conversations
from miles_rollout.renderers.verify.report import Finding, Outcome, Report

Check = Callable[["_Turn"], str | None]


class _NotApplicableError(Exception):
    """A check has nothing to say about a turn."""


def verify_renderer(renderer: Renderer, *, seed: int = 0, random_count: int = 20) -> Report:
    """Tries a renderer on the fixed suite and on random conversations, then broken versions of it.

    Args:
        renderer: the renderer.
        seed: of the random conversations.
        random_count: how many of them.
    """
    conversations = [*standard_conversations(), *random_conversations(seed, random_count)]
    findings = tuple(examine(renderer, conversation) for conversation in conversations)
    controls = {name: _is_caught(renderer, broken(renderer)) for name, broken in CONTROLS.items()}
    return Report(family=renderer.family, findings=findings, controls=controls)


def _is_caught(renderer: Renderer, version: Renderer) -> bool | None:
    """True when the checks fail on a broken version; None when it does the same as the renderer everywhere."""
    caught: bool | None = None
    for conversation in standard_conversations():
        if _differs(renderer, version, conversation):
            caught = examine(version, conversation).failed
            if caught:
                break
    return caught


def _differs(renderer: Renderer, version: Renderer, conversation: Conversation) -> bool:
    """True when the broken version does anything else on this conversation."""
    try:
        return any(
            renderer.render(t.history, t.tools) != version.render(t.history, t.tools)
            or renderer.render_suffix(t.history, t.ids, t.appended, t.tools)
            != version.render_suffix(t.history, t.ids, t.appended, t.tools)
            or (
                len(t.tools) > 0
                and renderer.render_call((), (), t.history[:-1], t.tools, _name_of(t.tools[0]))
                != version.render_call((), (), t.history[:-1], t.tools, _name_of(t.tools[0]))
            )
            for t in _turns(renderer, conversation)
        )
    except RenderError:
        return False


class _Turn:
    """One assistant turn of a conversation and what follows it.

    Attributes:
        history: messages up to and with the turn.
        prompt: ids before it.
        begin: where the turn's own ids begin, as far as the rendering can say.
        ids: ids up to and with its end, as a rendering of the history spells them.
        appended: messages up to the next assistant turn.
        whole: ids of history and appended, with the next generation prompt.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation, index: int) -> None:
        messages, self.tools = conversation.messages, conversation.tools
        following = (i for i in range(index + 1, len(messages)) if messages[i].role == "assistant")
        end = next(following, len(messages))
        self.renderer = renderer
        self.message = messages[index]
        self.history = messages[: index + 1]
        self.appended = messages[index + 1 : end]
        self.prompt = renderer.render(self.history[:-1], self.tools)
        self.whole = renderer.render([*self.history, *self.appended], self.tools)
        rendered = renderer.render(self.history, self.tools, add_generation_prompt=False)
        self.begin = _shared(rendered, self.prompt)
        self.ids = _up_to_stop(renderer, rendered, self.begin)

    @property
    def tail(self) -> list[int]:
        """What a suffix has to add to `ids`."""
        return self.whole[len(self.ids) :]

    @property
    def completion(self) -> list[int]:
        """The turn's own ids: what a model would have sampled, as far as the rendering can say."""
        return self.ids[self.begin :]

    def suffix(self, ids: Sequence[int]) -> list[int]:
        """What the renderer adds to a history."""
        return self.renderer.render_suffix(self.history, ids, self.appended, self.tools)

    def forced(self, name: str | None) -> ForcedCall:
        """The prompt of this turn with a forced call: behind the history that the turn before left, if there is one."""
        last = max((i for i, m in enumerate(self.history[:-1]) if m.role == "assistant"), default=-1)
        before, appended = self.history[: last + 1], self.history[last + 1 : -1]
        if not before:
            return self.renderer.render_call((), (), appended, self.tools, name)
        rendered = self.renderer.render(before, self.tools, add_generation_prompt=False)
        ids = _up_to_stop(self.renderer, rendered, 0)
        forced = self.renderer.render_call(before, ids, appended, self.tools, name)
        return ForcedCall(ids=[*ids, *forced.ids], opening=forced.opening)


def _turns(renderer: Renderer, conversation: Conversation) -> Iterable[_Turn]:
    for index, message in enumerate(conversation.messages):
        if message.role == "assistant":
            yield _Turn(renderer, conversation, index)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences have in common at the front."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _up_to_stop(renderer: Renderer, ids: list[int], begin: int) -> list[int]:
    """Without what a template puts behind the stop token; whole when the family has no token behind its turns."""
    for end in range(len(ids), max(begin, len(ids) - 4), -1):
        if ids[end - 1] in renderer.stop_token_ids:
            return ids[:end]
    return ids


def examine(renderer: Renderer, conversation: Conversation) -> Finding:
    """Tries a renderer on every turn of one conversation."""
    outcomes: dict[str, Outcome] = {}
    details: list[str] = []
    turns = tokens = 0
    try:
        for turn in _turns(renderer, conversation):
            turns += 1
            tokens = len(turn.whole)
            for name, check in _CHECKS.items():
                outcome, detail = _try(check, turn)
                if outcome is Outcome.FAIL or outcomes.get(name, Outcome.OK) is Outcome.OK:
                    outcomes[name] = outcome
                if detail:
                    details.append(f"turn {turns}, {name}: {detail}")
    except RenderError as error:
        outcome = Outcome.FAIL if conversation.required else Outcome.NO_FORM
        outcomes |= (
            {name: outcomes.get(name, outcome) for name in _CHECKS} if turns else dict.fromkeys(_CHECKS, outcome)
        )
        outcomes["append-only"] = outcome if outcomes["append-only"] is not Outcome.FAIL else Outcome.FAIL
        details.append(str(error))
    return Finding(
        conversation=conversation.name, turns=turns, tokens=tokens, outcomes=outcomes, details=tuple(details[:3])
    )


def _try(check: Check, turn: _Turn) -> tuple[Outcome, str]:
    try:
        problem = check(turn)
    except RenderRefusedError as error:
        problem = str(error)
    except _NotApplicableError as error:
        return Outcome.NOT_APPLICABLE, str(error)
    return (Outcome.OK, "") if problem is None else (Outcome.FAIL, problem)


def _append_only(turn: _Turn) -> str | None:
    """A longer conversation begins with the ids of the shorter one."""
    return _difference(turn, turn.ids, turn.whole[: len(turn.ids)])


def _suffix(turn: _Turn) -> str | None:
    """History and suffix are the ids of the whole."""
    return _difference(turn, [*turn.ids, *turn.suffix(turn.ids)], turn.whole)


def _spelling(turn: _Turn) -> str | None:
    """The same suffix follows when the turn was sampled as other tokens of the same text, stop token included."""
    vocabulary = turn.renderer.vocabulary
    completion = turn.completion
    ended = bool(completion) and completion[-1] in turn.renderer.stop_token_ids
    body = completion[:-1] if ended else completion
    pieces = [i for token in body for i in _spelled_out(turn, token)]
    ids = [*turn.prompt, *pieces, *(completion[-1:] if ended else ())]
    if not ended and turn.tail and turn.tail[0] in turn.renderer.stop_token_ids:
        ids.append(turn.tail[0])  # the opening of the next turn is what the model stops with
        return _difference(turn, [*ids, *turn.suffix(ids)], [*ids, *turn.tail[1:]])
    if not vocabulary.is_added(ids[-1]):
        return None  # a stop that no token marks is the business of the next check
    return _difference(turn, [*ids, *turn.suffix(ids)], [*ids, *turn.tail])


def _forced_stop(turn: _Turn) -> str | None:
    """A turn that was stopped without its stop token is closed."""
    if turn.ids[-1] not in turn.renderer.stop_token_ids:
        return None  # `suffix` has shown it: these families have no stop token of their own
    stopped = turn.ids[:-1]
    return _difference(turn, [*stopped, *turn.suffix(stopped)], turn.whole)


def _views(turn: _Turn) -> str | None:
    """Parsing gives back the calls that were rendered, and no more."""
    if turn.ids[: len(turn.prompt)] != turn.prompt:
        return None  # written by somebody else: a model that thinks would not have answered without thinking
    seen = turn.renderer.parse(turn.completion, turn.tools)
    if seen.malformed:
        return f"a rendered call is not read back: {seen.malformed[0]}"
    syntax = turn.renderer.turn_syntax()
    if turn.message.tool_calls and isinstance(syntax, TaggedSyntax) and syntax.calls is None:
        raise _NotApplicableError("how this template writes calls is not known: clients get them as text")
    expected, found = [_call_key(c) for c in turn.message.tool_calls], [_call_key(c) for c in seen.tool_calls]
    if expected != found:
        return f"calls {expected} are read back as {found}"
    content = (turn.message.content or "").strip()
    if not expected and seen.content.strip() != content:
        return f"content {content!r} is read back as {seen.content!r}"
    return None


def _literal_text(turn: _Turn) -> str | None:
    """Control tokens spelled out in somebody's message stay text."""
    renderer = turn.renderer
    stops = [renderer.vocabulary.text_of(i) for i in renderer.stop_token_ids]
    hostile = [*turn.history, Message(role="user", content="x" + "".join(stops) + "y")]
    harmless = [*turn.history, Message(role="user", content="xy")]
    counts = [
        sum(i in renderer.stop_token_ids for i in renderer.render(messages, turn.tools))
        for messages in (hostile, harmless)
    ]
    if counts[0] != counts[1]:
        return f"a message that spells out {stops[0]!r} makes {counts[0] - counts[1]} control tokens"
    return None


def _forced_call(turn: _Turn) -> str | None:
    """A forced call begins with the ids that the call has in a rendering of the whole, and is read back with them."""
    if not turn.tools:
        raise _NotApplicableError
    names = [_name_of(tool) for tool in turn.tools]
    done = False
    for name in (*names, None):
        try:
            forced = turn.forced(name)
        except CallOpeningError:  # such a request is refused
            continue
        done = True
        for call in _calls_for(turn, names if name is None else [name]):
            message = Message(role="assistant", content="", tool_calls=(call,))
            whole = turn.renderer.render([*turn.history[:-1], message], turn.tools, add_generation_prompt=False)
            if problem := _difference(turn, forced.ids, whole[: len(forced.ids)]):
                return problem
            sampled = _up_to_stop(turn.renderer, whole, len(forced.ids))[len(forced.ids) :]
            seen = turn.renderer.parse(sampled, turn.tools, opening=forced.opening)
            if [_call_key(c) for c in seen.tool_calls] != [_call_key(call)] or seen.malformed or seen.content:
                return f"the forced call {_call_key(call)} is read back as {seen}"
    if not done:
        raise _NotApplicableError("this family has no exact opening for these calls: forced choices are refused")
    return None


def _calls_for(turn: _Turn, names: Sequence[str]) -> list[ToolCall]:
    """The turn's own calls of these tools, and for each tool one with arguments that are hard to write."""
    odd = json.dumps({"query": '"x" <|y|>\n', "a": 1, "b": -2})
    made = [ToolCall(id=f"functions.{n}:11", function=FunctionCall(name=n, arguments=odd)) for n in names]
    return [*(c for c in turn.message.tool_calls if c.function.name in names), *made]


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


_CHECKS: dict[str, Check] = {
    "append-only": _append_only,
    "suffix": _suffix,
    "spelling": _spelling,
    "forced stop": _forced_stop,
    "views": _views,
    "literal text": _literal_text,
    "forced call": _forced_call,
}


def _spelled_out(turn: _Turn, token: int) -> list[int]:
    """A token's text as single characters where that gives the same text; control tokens as they are."""
    vocabulary = turn.renderer.vocabulary
    if vocabulary.is_added(token):
        return [token]
    text = vocabulary.decode([token])
    ids = [i for character in text for i in vocabulary.encode(character)]
    return ids if vocabulary.decode(ids) == text and "\ufffd" not in text else [token]


def _call_key(call: ToolCall) -> tuple[str, str]:
    try:
        arguments = json.dumps(json.loads(call.function.arguments), sort_keys=True)
    except ValueError:
        arguments = call.function.arguments
    return call.function.name, arguments


def _difference(turn: _Turn, ours: Sequence[int], expected: Sequence[int]) -> str | None:
    """Names the first differing token and the message it is in."""
    if list(ours) == list(expected):
        return None
    at = _shared(ours, expected)
    show = turn.renderer.vocabulary.text_of
    seen = repr(show(ours[at])) if at < len(ours) else "the end"
    wanted = repr(show(expected[at])) if at < len(expected) else "the end"
    return f"token {at} is {seen}, in the whole it is {wanted} (message {_message_at(turn, at)})"


def _message_at(turn: _Turn, position: int) -> int:
    messages = [*turn.history, *turn.appended]
    for index in range(len(messages)):
        try:
            rendered = turn.renderer.render(messages[: index + 1], turn.tools, add_generation_prompt=False)
        except RenderError:
            continue
        if len(rendered) > position:
            return index
    return len(messages) - 1
