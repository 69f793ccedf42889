"""The tree as a state machine: what is accepted, what is refused, what is trained."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from session_factories import assistant, call, generation, tool, user

from miles_contracts import TrajectoryIdentity
from miles_rollout.session.assemble import tree_counters
from miles_rollout.session.errors import BadRequestError, HistoryDivergedError, NodeLimitError, SessionBusyError
from miles_rollout.session.matching import Repair, role_content_only
from miles_rollout.session.nodes import path_ids, path_prompt
from miles_rollout.session.rawprefix import RawPrefixes, RawText
from miles_rollout.session.tree import Policy, SessionTree

IDENTITY = TrajectoryIdentity(prompt_index=0, member=0)


def turn(tree, messages, reply, *, ids=(1, 2), prompt=(5,), truncated=False, tools=()):
    plan = tree.plan(messages, tools)
    new = np.asarray(prompt, dtype=np.int32)
    return tree.commit(plan, new, generation(ids, f"r{len(tree.nodes)}", truncated=truncated), reply)


def test_linear_extends_and_holds_only_what_is_new() -> None:
    tree = SessionTree()
    turn(tree, [user("a")], assistant("A"), prompt=(10, 11), ids=(12,))
    node = turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"), prompt=(13,), ids=(14, 15))
    assert node.messages == (user("b"),)
    assert node.start == 3
    assert path_ids(node.path()).tolist() == [10, 11, 12, 13, 14, 15]
    plan = tree.plan([user("a"), assistant("A"), user("b"), assistant("B"), user("c"), user("d")])
    stored = path_prompt(plan.parent)
    assert list(stored) == [10, 11, 12, 13, 14, 15] == msgspec.json.decode(stored.json)
    history = plan.history_messages()
    assert list(history) == history[:] == [user("a"), assistant("A"), user("b"), assistant("B")]
    assert (len(history), history[-1], history[0]) == (4, assistant("B"), user("a"))
    assert list(SessionTree().plan([user("a")]).history_messages()) == []
    assert plan.appended == (user("c"), user("d"))


def test_linear_retry_may_keep_what_follows_but_discards_one_turn_only() -> None:
    tree = SessionTree()
    turn(tree, [user("a")], assistant("A"))
    turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    with pytest.raises(HistoryDivergedError, match="ends after 1 messages"):
        tree.plan([user("a")])
    plan = tree.plan([user("a"), assistant("A"), user("b"), user("try again")])
    assert plan.retried is tree.tip
    assert plan.appended == (user("b"), user("try again"))
    assert tree_counters(tree).abandoned_turns == 0, "a plan changes nothing"
    turn(tree, [user("a"), assistant("A"), user("b"), user("try again")], assistant("B2"))
    assert tree_counters(tree).abandoned_turns == 1
    assert [n.reply.content for n in tree.tip.path()] == ["A", "B2"]
    with pytest.raises(HistoryDivergedError):
        tree.plan([user("a"), assistant("A"), user("b"), assistant("B"), user("c")])
    turn(tree, [user("a"), assistant("A"), user("b"), user("try again")], assistant("B3"))
    assert tree_counters(tree).abandoned_turns == 2
    assert len(tree.leaves()) == 1


def test_first_turn_retry() -> None:
    for policy in Policy:
        tree = SessionTree(policy)
        turn(tree, [user("a")], assistant("A"))
        turn(tree, [user("a")], assistant("A2"))
        assert [leaf.reply.content for leaf in tree.leaves()] == ["A2"]
        assert tree_counters(tree).abandoned_tokens == 2


@pytest.mark.parametrize(
    ("messages", "index", "field"),
    [
        ([user("x"), assistant("A"), user("b")], 0, "content"),
        ([user("a"), assistant("edited"), user("b"), assistant("B"), user("c")], 1, "content"),
        ([user("a"), assistant("A"), user("edited"), assistant("B"), user("c")], 2, "content"),
        ([user("a"), assistant("A"), user("b"), assistant("edited"), user("c")], 3, "content"),
        ([user("a"), assistant("A"), tool("b", "1")], 2, "role"),
        ([user("a"), user("c")], 1, "role"),
    ],
)
def test_linear_names_the_first_difference(messages, index, field) -> None:
    tree = SessionTree()
    turn(tree, [user("a")], assistant("A"))
    turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    with pytest.raises(HistoryDivergedError) as caught:
        tree.plan(messages)
    assert (caught.value.message_index, caught.value.field) == (index, field)
    assert caught.value.param == f"messages[{index}].{field}"
    assert len(tree.nodes) == 2


def test_branching_attaches_to_the_deepest_node() -> None:
    tree = SessionTree(Policy.BRANCHING)
    turn(tree, [user("a")], assistant("A"))
    b = turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    c = turn(tree, [user("a"), assistant("A"), user("b"), assistant("B"), user("c")], assistant("C"))
    d = turn(tree, [user("a"), assistant("A"), user("b"), assistant("B"), user("d")], assistant("D"))
    assert c.parent is b
    assert d.parent is b
    assert [leaf.reply.content for leaf in tree.leaves()] == ["C", "D"]
    edited = turn(tree, [user("a"), assistant("edited"), user("b")], assistant("E"))
    assert edited.parent is None
    assert edited.demoted == 1
    assert edited.messages[1] == assistant("edited")


def test_equal_nodes_the_latest_wins() -> None:
    tree = SessionTree(Policy.BRANCHING)
    turn(tree, [user("a")], assistant("A"))
    second = turn(tree, [user("a")], assistant("A"))
    assert tree.plan([user("a"), assistant("A"), user("b")]).parent is second


def test_an_abandoned_branch_that_is_continued_is_alive_again() -> None:
    tree = SessionTree(Policy.BRANCHING)
    turn(tree, [user("a")], assistant("A1"))
    turn(tree, [user("a")], assistant("A2"))
    assert len(tree.leaves()) == 1
    turn(tree, [user("a"), assistant("A1"), user("b")], assistant("B"))
    assert [leaf.reply.content for leaf in tree.leaves()] == ["A2", "B"]


def test_rewritten_ids_are_translated_along_the_path() -> None:
    for policy in Policy:
        tree = SessionTree(policy)
        turn(tree, [user("a")], assistant(None, calls=[call("f", "{}", "s1")]))
        mine = assistant(None, calls=[call("f", "{}", "m1")])
        history = [user("a"), mine, tool("r", "m1")]
        node = turn(tree, history, assistant(None, calls=[call("f", "{}", "s2")]))
        assert node.messages == (tool("r", "s1"),)
        mine2 = assistant(None, calls=[call("f", "{}", "m2")])
        history += [mine2, tool("r2", "m2")]
        node = turn(tree, history, assistant("end"))
        assert node.messages == (tool("r2", "s2"),)
        assert len(node.path()) == 3
        assert tree_counters(tree).repairs == {"tool_call_ids_rewritten": 2}
        # The ids as they were given are as good.
        stored = [user("a"), tree.nodes[0].reply, tool("r", "s1"), tree.nodes[1].reply, tool("r2", "s2")]
        assert tree.plan([*stored, assistant("end"), user("x")]).parent is node


def test_ids_rewritten_in_the_call_but_not_in_its_result_are_a_difference() -> None:
    tree = SessionTree()
    turn(tree, [user("a")], assistant(None, calls=[call("f", "{}", "s1")]))
    with pytest.raises(HistoryDivergedError) as caught:
        tree.plan([user("a"), assistant(None, calls=[call("f", "{}", "m1")]), tool("r", "s1")])
    assert caught.value.field == "tool_calls[0].id"


def test_a_repair_is_counted_once_a_turn() -> None:
    tree = SessionTree()
    turn(tree, [user("a")], assistant("A", reasoning="r"))
    turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    turn(tree, [user("a"), assistant("A"), user("b"), assistant("B"), user("c")], assistant("C"))
    assert tree_counters(tree).repairs == {"reasoning_omitted": 1}
    assert tree.nodes[0].repairs == {Repair.REASONING_OMITTED}


def test_role_content_only_takes_other_calls_for_the_same() -> None:
    tree = SessionTree(matcher=role_content_only)
    node = turn(tree, [user("a")], assistant("A", calls=[call("f", "{}", "1")]))
    assert tree.plan([user("a"), assistant("A"), user("b")]).parent is node


def test_linear_refuses_a_commit_after_another() -> None:
    tree = SessionTree()
    plan = tree.plan([user("a")])
    turn(tree, [user("a")], assistant("A"))
    with pytest.raises(SessionBusyError):
        tree.commit(plan, np.asarray([1], np.int32), generation([2], "late"), assistant("late"))
    assert len(tree.nodes) == 1


def test_node_limit_is_checked_before_sampling() -> None:
    tree = SessionTree(max_nodes=1)
    turn(tree, [user("a")], assistant("A"))
    with pytest.raises(NodeLimitError):
        tree.plan([user("a")])
    with pytest.raises(NodeLimitError):
        tree.plan_after(tree.tip, [assistant("A"), user("b")], ())
    with pytest.raises(NodeLimitError):
        tree.plan_ids(np.asarray([1], np.int32))


def test_plan_after_settles_only_what_it_can() -> None:
    tree = SessionTree(Policy.BRANCHING)
    a = turn(tree, [user("a")], assistant("A"))
    b = turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    assert tree.plan_after(a, [assistant("A"), user("c")], ()).parent is a
    assert tree.plan_after(a, [assistant("A"), user("b"), assistant("B"), user("c")], ()) is None
    assert tree.plan_after(a, [assistant("x"), user("c")], ()) is None
    assert tree.plan_after(a, [], ()) is None
    assert tree.plan_after(a, [assistant("A"), user("c")], ({"type": "function"},)) is None
    with pytest.raises(BadRequestError):
        tree.plan_after(b, [assistant("B")], ())
    linear = SessionTree()
    a = turn(linear, [user("a")], assistant("A"))
    turn(linear, [user("a"), assistant("A"), user("b")], assistant("B"))
    assert linear.plan_after(a, [assistant("A"), user("c")], ()) is None


def test_raw_prefixes_find_only_whole_messages() -> None:
    tree = SessionTree()
    node = turn(tree, [user("a")], assistant("A"))
    prefixes = RawPrefixes()
    prefixes.remember(RawText(b'[{"role": "user"} ] '), node, 1)
    assert prefixes.find(RawText(b'[{"role": "user"}, {"x": 1}]')) == (node, 1, b'[ {"x": 1}]')
    assert prefixes.find(RawText(b'[{"role": "user"} \n, {"x": 1}]')) == (node, 1, b'[ {"x": 1}]')
    assert prefixes.find(RawText(b'[{"role": "user"}]')) is None
    assert prefixes.find(RawText(b'[{"role": "user", "x": 1}]')) is None
    assert prefixes.find(RawText(b'[{"role":"user"}, {"x": 1}]')) is None
    prefixes.remember(RawText(b"[]"), node, 0)
    prefixes.remember(RawText(b" "), node, 0)
    assert prefixes.find(RawText(b'[{"role": "user"}, {"x": 1}]')) is not None


def test_raw_prefixes_are_bounded_and_follow_the_branch() -> None:
    tree = SessionTree(Policy.BRANCHING)
    prefixes = RawPrefixes(capacity=2)
    a = turn(tree, [user("a")], assistant("A"))
    prefixes.remember(RawText(b'[{"a":1}]'), a, 1)
    b = turn(tree, [user("a"), assistant("A"), user("b")], assistant("B"))
    prefixes.remember(RawText(b'[{"a":1},{"A":1},{"b":1}]'), b, 3)
    assert prefixes.find(RawText(b'[{"a":1},{"x":1}]')) is None, "superseded by its continuation"
    for name in (b"c", b"d"):
        node = turn(tree, [user(name.decode())], assistant("x"))
        prefixes.remember(RawText(b'[{"%s":1}]' % name), node, 1)
    assert prefixes.find(RawText(b'[{"a":1},{"A":1},{"b":1},{"z":1}]')) is None
    assert prefixes.find(RawText(b'[{"d":1},{"z":1}]'))[0] is node


def test_raw_text_lies_where_its_body_has_it() -> None:
    body = b' {"messages" : [{"a": 1}], "n": 1}'
    part = msgspec.json.decode(body, type=dict[str, msgspec.Raw])["messages"]
    raw = RawText.of(body, part)
    assert (raw.body is body, bytes(raw.view), len(raw)) == (True, b'[{"a": 1}]', 10)
    assert raw.startswith(RawText(b'[{"a'))
    assert not raw.startswith(RawText(b'[{"a": 1}],'))  # the body goes on like that, the part does not
    elsewhere = RawText.of(b"another body", part)
    assert (elsewhere.body, bytes(elsewhere.view)) == (b'[{"a": 1}]', b'[{"a": 1}]')
    assert len(RawText.of(body, msgspec.Raw(b""))) == 0
