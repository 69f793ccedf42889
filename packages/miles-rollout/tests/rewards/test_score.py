"""Whatever a reward function does, scoring ends in a finite number or in a reason."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from miles_contracts import InvalidFieldError, Message, Reward, Task
from miles_rollout.imports import load_object
from miles_rollout.rewards import BatchReward, ExactMatch, UserReward, score

TASK = Task(prompt_index=0, messages=(Message(role="user", content="q"),), label="4")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("user_rewards_for_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize("value", [1, 0.5, True, -3, np.float32(0.25), np.int64(2), np.array(1.5)])
async def test_numbers_are_accepted(value: object) -> None:
    outcome = await score(lambda t, r: value, TASK, "x")
    assert outcome.value == float(value)
    assert isinstance(outcome.value, float)
    assert outcome.error is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (np.float32("nan"), "nan"),
        (10**400, "no float can hold"),
        (None, "NoneType"),
        ("1.0", "str"),
        ([1.0], "list"),
        (np.array([1.0, 2.0]), "ndarray"),
        ({"reward": 1.0}, "dict"),
    ],
)
async def test_everything_else_is_a_failure_with_a_reason(value: object, reason: str) -> None:
    outcome = await score(lambda t, r: value, TASK, "x")
    assert outcome.value is None
    assert reason in (outcome.error or "")


async def test_what_a_reward_raises_is_the_reason() -> None:
    outcome = await score(lambda t, r: 1 / 0, TASK, "x")
    assert (outcome.error or "").startswith("reward raised ZeroDivisionError: division by zero (")

    async def own_timeout(t: Task, r: str) -> float:
        raise TimeoutError("the judge is slow")

    outcome = await score(own_timeout, TASK, "x", timeout_s=60)
    assert (outcome.error or "").startswith("reward raised TimeoutError: the judge is slow (")


@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
async def test_where_a_reward_raised_is_named_and_logged_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"raising_rewards_{kind}"
    file = tmp_path / f"{name}.py"
    file.write_text(
        "import json\n\ndef parse(text):\n    return json.loads(text)\n\n"
        "def plain(task, response):\n    return parse(response)\n\n"
        "async def waiting(task, response):\n    return parse(response)\n\n"
        "def batch(tasks, responses):\n    return [parse(r) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward: Reward
    if kind == "batch":
        reward = BatchReward(load_object(f"{name}:batch", field="reward"))
    else:
        reward = UserReward(f"{name}:{'plain' if kind == 'plain' else 'waiting'}")
    for _ in range(3):
        outcome = await score(reward, TASK, "no JSON")
        assert outcome.error is not None
        assert "JSONDecodeError: Expecting value" in outcome.error
        assert outcome.error.endswith(f"({file}:4)"), "the line of the user's file, not of json's"
    records = [r for r in caplog.records if str(file) in r.getMessage()]
    assert len(records) == 1
    assert f'File "{file}", line 4, in parse' in caplog.text


async def test_a_reward_of_the_package_names_no_place(caplog: pytest.LogCaptureFixture) -> None:
    unlabelled = Task(prompt_index=0, messages=TASK.messages)
    outcome = await score(ExactMatch(), unlabelled, "x")
    assert (outcome.error or "").endswith("has no label")
    assert not caplog.records


async def test_a_hanging_reward_is_ended() -> None:
    async def hang(t: Task, r: str) -> float:
        await asyncio.Event().wait()
        return 0.0

    assert (await score(hang, TASK, "x", timeout_s=0.02)).error == "reward gave no answer within 0.02 s"


async def test_user_function_plain_and_async(module: types.ModuleType) -> None:
    loop_thread = threading.get_ident()
    seen = []

    def plain(task: Task, response: str) -> float:
        seen.append(threading.get_ident())
        return float(response == task.label)

    async def quick(task: Task, response: str) -> float:
        seen.append(threading.get_ident())
        return 0.5

    class Judge:
        async def __call__(self, task: Task, response: str) -> float:
            return 0.75

    module.plain, module.quick, module.judge = plain, quick, Judge()
    assert (await score(UserReward("user_rewards_for_test:plain"), TASK, "4")).value == 1.0
    assert (await score(UserReward("user_rewards_for_test:quick"), TASK, "4")).value == 0.5
    assert (await score(UserReward("user_rewards_for_test:judge"), TASK, "4")).value == 0.75
    assert seen[0] != loop_thread
    assert seen[1] == loop_thread


async def test_a_blocking_user_function_neither_blocks_the_loop_nor_the_next_call(module: types.ModuleType) -> None:
    release = threading.Event()

    def block(task: Task, response: str) -> float:
        if response == "hang":
            release.wait()
        return 1.0

    module.block = block
    reward = UserReward("user_rewards_for_test:block", max_threads=2)
    assert (await score(reward, TASK, "hang", timeout_s=0.05)).value is None
    assert (await score(reward, TASK, "fine", timeout_s=30)).value == 1.0
    release.set()


async def test_a_hanging_thread_keeps_its_slot(module: types.ModuleType) -> None:
    release = threading.Event()
    module.block = lambda task, response: release.wait() and 1.0
    reward = UserReward("user_rewards_for_test:block", max_threads=1)
    assert (await score(reward, TASK, "a", timeout_s=0.02)).value is None
    assert (await score(reward, TASK, "b", timeout_s=0.02)).value is None, "the only thread still hangs"
    release.set()
    assert (await score(reward, TASK, "c", timeout_s=30)).value == 1.0


async def test_user_function_that_raises_odd_things(module: types.ModuleType) -> None:
    def stop(task: Task, response: str) -> float:
        raise StopIteration

    def leave(task: Task, response: str) -> float:
        raise KeyError("missing")

    module.stop, module.leave = stop, leave
    assert "StopIteration" in ((await score(UserReward("user_rewards_for_test:stop"), TASK, "")).error or "")
    assert "KeyError: 'missing'" in ((await score(UserReward("user_rewards_for_test:leave"), TASK, "")).error or "")


def test_a_user_function_of_another_shape_is_refused_early(module: types.ModuleType) -> None:
    module.one = lambda response: 1.0
    with pytest.raises(InvalidFieldError, match=r"reward\(task, response\)"):
        UserReward("user_rewards_for_test:one")
    with pytest.raises(InvalidFieldError, match="has no two"):
        UserReward("user_rewards_for_test:two")


async def test_batches_are_scored_together_and_in_order() -> None:
    sizes = []

    async def length(tasks, responses):
        sizes.append(len(responses))
        return [float(len(r)) for r in responses]

    reward = BatchReward(length, max_batch=3, max_wait_s=0.01)
    answers = ["a" * n for n in range(7)]
    assert await asyncio.gather(*(reward(TASK, a) for a in answers)) == [float(n) for n in range(7)]
    assert sizes == [3, 3, 1]


async def test_a_failing_batch_fails_each_of_its_members() -> None:
    for bad, reason in ((lambda t, r: 1 / 0, "ZeroDivisionError"), (lambda t, r: [1.0], "1 rewards for 2")):
        reward = BatchReward(bad, max_batch=2)
        outcomes = await asyncio.gather(*(score(reward, TASK, str(i)) for i in range(2)))
        assert all(reason in (o.error or "") for o in outcomes)


async def test_a_cancelled_member_is_not_scored() -> None:
    seen = []
    reward = BatchReward(lambda t, r: seen.append(list(r)) or [1.0] * len(r), max_batch=9, max_wait_s=0.05)
    first = asyncio.create_task(reward(TASK, "gone"))
    await asyncio.sleep(0)
    second = asyncio.create_task(reward(TASK, "here"))
    first.cancel()
    assert await second == 1.0
    assert seen == [["here"]]


def test_bad_batches_are_refused() -> None:
    for bad in ({"max_batch": 0}, {"max_wait_s": -1}):
        with pytest.raises(InvalidFieldError, match=next(iter(bad))):
            BatchReward(lambda t, r: [], **bad)


def test_an_error_of_ours_that_passed_through_a_sibling_package_explains_itself() -> None:
    from miles_contracts import EngineError
    from miles_rollout.raised import describe_raised

    def raised(file: str) -> str:
        space: dict[str, object] = {"EngineError": EngineError}
        exec(compile("def call():\n    raise EngineError('http://e:1', 'refused')\n", file, "exec"), space)
        with pytest.raises(EngineError) as caught:
            space["call"]()  # type: ignore[operator]
        trace = caught.value.__traceback__
        assert trace is not None
        return describe_raised(caught.value.with_traceback(trace.tb_next))  # without this test's own frame

    assert raised("/site/miles_loop/audit.py").endswith("refused")
    assert raised("/home/me/agent.py").endswith("(/home/me/agent.py:2)")
