"""Any interleaving of sessions, retries, branches, compactions and faults keeps the books.

What an engine sampled is found once and only once: in one trajectory's trained tokens, in the abandoned turns, or
in the discarded ones. What an engine was given is always the stored prefix and a new suffix.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from session_factories import WEATHER, ScriptedEngine, write_tokenizer

from miles_contracts import EngineError, EngineUnavailableError, GenerateResult, VersionSpan
from miles_rollout.renderers import load_renderer
from miles_rollout.session import EngineSampler, OpenRequest, Policy, SessionConfig, SessionError, SessionService, audit
from miles_rollout.session.nodes import path_ids
from miles_rollout.session.responses import chat_body

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "n": 1}}\n</tool_call>'
REPLIES = [
    "yes",
    "no",
    "",
    "<think>\nhm\n</think>\n\nyes",
    f"<think>\nx\n</think>\n\nSee.\n{CALL}",
    CALL,
    f"{CALL}\n{CALL}",
]
REST = '"city": "Oslo", "n": 1}}\n</tool_call>'
SPOILT = st.frozensets(st.sampled_from(["reasoning", "whitespace", "arguments", "ids"]))
ABORT = GenerateResult(output_ids=[1, 2], logprobs=[-1.0, -1.0], version_spans=(), finish_reason="abort")
GARBAGE = GenerateResult(output_ids=[1, 2], logprobs=[-1.0], version_spans=(), finish_reason="stop")
BAD_SPANS = GenerateResult(
    output_ids=[1], logprobs=[-1.0], version_spans=(VersionSpan(start=0, end=2, version=0),), finish_reason="stop"
)
FAULTS = [EngineError("e", "bad"), EngineUnavailableError("e", "dead"), TimeoutError(), ABORT, GARBAGE, BAD_SPANS]


@cache
def renderer() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_renderer(Path(folder), "qwen3")


def spoil(message: dict[str, Any], how: frozenset[str], names: dict[str, str]) -> dict[str, Any]:
    """What a harness may do to its copy of our message without meaning it."""
    out = dict(message)
    if "reasoning" in how:
        out.pop("reasoning_content", None)
    if "whitespace" in how:
        out["content"] = f" {out.get('content') or ''}\n"
    calls = []
    for call in out.get("tool_calls", ()):
        function = dict(call["function"])
        if "arguments" in how:
            function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=1)
        calls.append({"id": names.get(call["id"], call["id"]), "type": "function", "function": function, "index": 7})
    if calls:
        out["tool_calls"] = calls
    return out


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = ScriptedEngine(renderer())
        self.service = SessionService(EngineSampler(self.engine), renderer(), SessionConfig(max_nodes=12))
        self.sessions: list[Any] = []
        self.histories: list[list[list[dict[str, Any]]]] = []
        self.counter = 0

    def teardown(self) -> None:
        self.loop.close()

    # -- steps ----------------------------------------------------------------------------------------------

    async def ask(self, index: int, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any] | None:
        session = self.sessions[index]
        before = len(session.tree.nodes), session.counters().abandoned_turns
        data = json.dumps({"model": "m", "messages": messages, "tools": [WEATHER], **fields}).encode()
        try:
            answer, _ = await self.service.chat(session.id, data)
        except SessionError:
            assert (len(session.tree.nodes), session.counters().abandoned_turns) == before
            return None
        return json.loads(chat_body(answer))["choices"][0]["message"]

    def step(self, index: int, messages: list[dict], how: frozenset[str] = frozenset(), **fields: Any) -> bool:
        message = self.loop.run_until_complete(self.ask(index, messages, **fields))
        if message is not None:
            self.histories[index].append(self.follow_up(messages, message, how))
        return message is not None

    def follow_up(self, messages: list[dict[str, Any]], message: dict[str, Any], how: frozenset[str]) -> list[dict]:
        self.counter += 1
        ids = [c["id"] for c in message.get("tool_calls", ())]
        names = {i: f"mine-{self.counter}-{n}" for n, i in enumerate(ids)} if "ids" in how else {}
        results = [
            {"role": "tool", "content": f"result {self.counter}", "tool_call_id": names.get(i, i)} for i in ids
        ] or [{"role": "user", "content": f"go on {self.counter}"}]
        return [*messages, spoil(message, how, names), *results]

    def pick(self, data: Any) -> tuple[int, list[dict[str, Any]]]:
        index = data.draw(st.integers(0, len(self.sessions) - 1), "session")
        known = self.histories[index]
        return index, known[data.draw(st.integers(max(0, len(known) - 3), len(known) - 1), "history")]

    @rule(policy=st.sampled_from(list(Policy)))
    def open(self, policy: Policy) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(self.service.open(OpenRequest(policy=policy)))
            self.histories.append([[{"role": "user", "content": "start"}]])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reply=st.sampled_from(REPLIES), how=SPOILT)
    def turn(self, data: Any, reply: str, how: frozenset[str]) -> None:
        index, messages = self.pick(data)
        self.engine.replies = [reply]
        self.step(index, messages, how)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reply=st.sampled_from(REPLIES), how=SPOILT)
    def a_harmless_copy_keeps_every_turn_trainable(self, data: Any, reply: str, how: frozenset[str]) -> None:
        index = data.draw(st.integers(0, len(self.sessions) - 1), "session")
        tree = self.sessions[index].tree
        messages = self.histories[index][-1]
        tip = tree.tip
        if len(tree.nodes) == 12 or (tip is not None and tip.sampled.truncated):
            return
        self.engine.replies = [reply]
        assert self.step(index, messages, how)
        assert tree.tip.parent is tip
        assert tree.tip.demoted == 0

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reply=st.sampled_from([REST, "not JSON", ""]), how=SPOILT)
    def forced_call(self, data: Any, reply: str, how: frozenset[str]) -> None:
        index, messages = self.pick(data)
        self.engine.replies = [reply]
        before = self.sessions[index].counters().forced_calls
        if self.step(index, messages, how, tool_choice="required"):
            node = self.sessions[index].tree.nodes[-1]
            opening = renderer().decode(node.prompt_ids[len(node.prompt_ids) - node.opening :].tolist())
            assert opening == '<tool_call>\n{"name": "weather", "arguments": {'
            assert self.sessions[index].counters().forced_calls == before + 1
            assert bool(node.reply.tool_calls) == (reply == REST)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def truncated(self, data: Any) -> None:
        index, messages = self.pick(data)
        self.engine.replies = ["much longer than the budget"]
        self.step(index, messages, max_tokens=3)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def compact(self, data: Any) -> None:
        index, messages = self.pick(data)
        self.counter += 1
        self.step(index, [{"role": "user", "content": f"summary {self.counter} of {len(messages)}"}])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), edited=st.integers(0, 5))
    def edit(self, data: Any, edited: int) -> None:
        index, messages = self.pick(data)
        changed = [dict(m) for m in messages]
        target = changed[edited % len(changed)]
        target["content"] = f"{target.get('content') or ''} (edited)"
        self.step(index, changed)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), fault=st.sampled_from(FAULTS))
    def fault(self, data: Any, fault: Any) -> None:
        index, messages = self.pick(data)
        self.engine.replies = [fault]
        assert self.loop.run_until_complete(self.ask(index, messages)) is None

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.integers(2, 3))
    def at_once(self, data: Any, count: int) -> None:
        picks = [self.pick(data) for _ in range(count)]
        self.engine.replies = []

        async def together() -> list[Any]:
            self.engine.gate = asyncio.Event()
            tasks = [asyncio.ensure_future(self.ask(index, messages)) for index, messages in picks]
            for _ in range(5):
                await asyncio.sleep(0)
            self.engine.gate.set()
            return await asyncio.gather(*tasks)

        answers = self.loop.run_until_complete(together())
        self.engine.gate = None
        for (index, messages), message in zip(picks, answers, strict=True):
            if message is not None:
                self.histories[index].append(self.follow_up(messages, message, frozenset()))

    # -- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        found: list[str] = []
        for session in self.sessions:
            trajectories = session.trajectories(None)
            counters = session.counters()
            trained: dict[str, int] = {}
            for trajectory in trajectories:
                for turn in trajectory.turns:
                    given, said, _ = self.engine.said[turn.request_id]
                    assert trajectory.token_ids[: turn.start].tolist() == given
                    assert trajectory.token_ids[turn.start : turn.end].tolist() == said
                    mask = trajectory.loss_mask[turn.start : turn.end]
                    assert mask.all() or not mask.any()
                    trained[turn.request_id] = trained.get(turn.request_id, 0) + bool(mask.any() or not said)
            nodes = session.tree.nodes
            abandoned = [n.sampled.request_id for n in nodes if session.tree.abandoned(n)]
            assert len(abandoned) == counters.abandoned_turns
            assert not set(abandoned) & trained.keys()
            assert {n.sampled.request_id for n in nodes} == set(abandoned) | trained.keys()
            for name, times in trained.items():
                assert times == 1 or not self.engine.said[name][1], f"{name} is trained {times} times"
            assert sum(t.num_trained for t in trajectories) + counters.abandoned_tokens == counters.sampled_tokens
            assert audit(trajectories).mismatches == 0
            if session.tree.policy is Policy.LINEAR:
                assert len(trajectories) <= 1
            for node in nodes:
                parent = node.parent.path() if node.parent else []
                given = self.engine.said[node.sampled.request_id][0]
                assert given == [*path_ids(parent).tolist(), *node.prompt_ids.tolist()]
            found += [n.sampled.request_id for n in nodes]
        assert sorted(found) == sorted(set(found))
        discarded = sum(s.counters().discarded_turns for s in self.sessions)
        faults = len(self.engine.said) - len(found)
        assert 0 <= faults <= discarded


Books.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBooks = Books.TestCase
