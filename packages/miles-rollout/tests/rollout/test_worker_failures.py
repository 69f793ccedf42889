"""What fails is counted, tried again and given up; what cannot go on ends the worker loudly, with the reason."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence

import pytest
from rollout_factories import trajectory
from worker_driving import PREFIX, Policy, build, indices, settle

from miles_contracts import (
    DeadlineExceededError,
    FilterDecision,
    Group,
    Status,
    Task,
    Trajectory,
)
from miles_rollout.worker import ErrorPolicy, RolloutDiedError


async def test_a_failed_member_fails_its_group_and_is_counted() -> None:
    async def fail(prompt: int, member: int, _: int) -> None:
        if prompt == 1 and member == 1:
            raise ValueError("tool crashed")

    worker = build(Policy(fail))
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert indices(batch.groups) == [0, 2]
    metrics = worker.metrics()
    assert metrics[PREFIX + "aborted_groups_filtered"] == 1
    assert metrics[PREFIX + "dropped_prompts"] == 1
    assert metrics["rollout/errors/ValueError"] == 1
    assert metrics["rollout/failed_ratio"] == pytest.approx(1 / 6)
    assert metrics[PREFIX + "wasted_tokens"] == 2, "the sibling's tokens"
    await worker.close()


async def test_failed_prompts_are_retried_with_new_attempts_and_then_given_up(caplog) -> None:
    async def fail(prompt: int, _: int, attempt: int) -> None:
        if prompt == 1 or (prompt == 0 and attempt == 0):
            raise ValueError("no")

    policy = Policy(fail)
    worker = build(policy, size=1, retry=True, max_retries=2)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert [(g.prompt_index, g.attempt) for g in batch.groups] == [(0, 1), (2, 0)]
    assert [a for p, _, a in policy.calls if p == 1] == [0, 1, 2]
    metrics = worker.metrics()
    assert metrics[PREFIX + "retries"] == 3
    assert metrics[PREFIX + "given_up_prompts"] == 1
    assert "prompt 1 is given up after attempt 2: ValueError: no" in caplog.text
    assert metrics["rollout/bias/dropped_groups"] == 4, "every attempt"
    assert metrics["rollout/bias/left_out_groups"] == 1, "one prompt was never trained"
    ((reason, count),) = worker.failures.items()
    assert (reason.partition(" (")[0], count) == ("ValueError: no", 4)
    assert sum("a group failed: ValueError: no" in r.getMessage() for r in caplog.records) == 1
    await worker.close()


async def test_failures_that_an_episode_returns_are_counted_by_what_failed() -> None:
    async def generate(task: Task, member: int, attempt: int) -> Sequence[Trajectory]:
        why = {0: "reward raised ValueError: no", 1: "the reward is nan, not a finite number", 2: "audit: 3 differ"}
        if task.prompt_index == 3:
            return [trajectory(3, member, status=Status.ABORTED, error="abort")]
        error = why.get(task.prompt_index)
        status = Status.FINISHED if error is None else Status.FAILED
        return [trajectory(task.prompt_index, member, status=status, error=error)]

    worker = build(generate, size=1)
    await worker.start(0)
    await worker.collect(1, train_version=0)
    metrics = worker.metrics()
    errors = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("rollout/errors/")}
    assert errors == {"reward": 2, "failed": 1, "aborted": 1}
    await worker.close()


async def test_where_a_generate_function_raised_is_in_the_reason_and_logged_once(tmp_path, monkeypatch, caplog) -> None:
    file = tmp_path / "raising_generate.py"
    file.write_text(
        "import json\n\nasync def generate(task, member, attempt):\n    return parse('no JSON')\n\n"
        "def parse(text):\n    return json.loads(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    generate = importlib.import_module("raising_generate").generate
    worker = build(generate, size=1, retry=True, max_retries=3, max_failures_in_a_row=6)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match=rf"JSONDecodeError: Expecting value.* \({file}:7\)"):
        await worker.collect(2, train_version=0)
    assert worker.metrics()["rollout/errors/JSONDecodeError"] == 6
    told = [r.getMessage() for r in caplog.records if "logged once" in r.getMessage()]
    assert told == [f"an episode's generate function raised at {file}:7 (logged once)"]
    assert f'File "{file}", line 7, in parse' in caplog.text
    await worker.close()


async def test_a_failed_member_can_be_replaced_alone() -> None:
    async def fail(_: int, member: int, attempt: int) -> None:
        if member == 1 and attempt == 0:
            raise ValueError("no")

    policy = Policy(fail)
    worker = build(policy, replace_members=1)
    await worker.start(0)
    batch = await worker.collect(2, train_version=0)
    assert indices(batch.groups) == [0, 1]
    assert [(t.identity.member, t.identity.attempt) for t in batch.groups[0]] == [(0, 0), (1, 1)]
    assert worker.metrics()[PREFIX + "replaced_members"] == 2
    await worker.close()


async def test_a_hanging_episode_is_ended() -> None:
    async def hang(prompt: int, member: int, _: int) -> None:
        if prompt == 0 and member == 0:
            await asyncio.Event().wait()

    worker = build(Policy(hang), episode_timeout_s=0.5)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert worker.metrics()["rollout/errors/episode_timeout"] == 1
    await worker.close()


async def test_a_timeout_inside_the_episode_is_not_its_own() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 0:
            raise TimeoutError("the tool's own")

    worker = build(Policy(fail), size=1, episode_timeout_s=60)
    await worker.start(0)
    await worker.collect(2, train_version=0)
    assert worker.metrics()["rollout/errors/TimeoutError"] == 1
    await worker.close()


async def test_fatal_errors_kill_the_worker_even_when_the_buffer_holds_a_batch() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 2:
            raise ValueError("broken environment")

    worker = build(Policy(fail), depth=1, on_error=ErrorPolicy.FATAL)
    await worker.start(0)
    await settle()
    with pytest.raises(RolloutDiedError, match="group-2 failed: ValueError: broken environment") as caught:
        await worker.collect(2, train_version=0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(RolloutDiedError):
        await worker.quiesce()
    await worker.close()


async def test_a_waiting_collect_hears_of_the_death() -> None:
    async def fail(prompt: int, *_: int) -> None:
        if prompt == 1:
            await asyncio.sleep(0.01)
            raise ValueError("late")

    worker = build(Policy(fail), on_error=ErrorPolicy.FATAL)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="late"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_failing_for_ever_ends_with_the_reason() -> None:
    async def fail(*_: int) -> None:
        raise ConnectionError("no engine")

    worker = build(Policy(fail), max_failures_in_a_row=5)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="5 groups in a row failed; the last: ConnectionError: no engine"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_filtering_for_ever_warns_and_ends_with_reasons_and_remedies() -> None:
    def decide(group: Group) -> FilterDecision:
        return FilterDecision(keep=False, reason="odd" if group.prompt_index % 2 else "even")

    worker = build(Policy(), group_filter=decide, max_filtered_in_a_row=16)
    told: list[str] = []
    worker.on_warning = told.append
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="dropped 16 groups in a row and kept none") as caught:
        await worker.collect(2, train_version=0)
    await worker.close()
    for expected in ("odd: 8", "even: 8", "mean 0.5, from 0 to 1", "temperature", "group_size", "rollout.filter"):
        assert expected in str(caught.value)
    assert len(told) == 7, "after each eighth of the bound but the last"
    assert "dropped 2 groups in a row" in told[0]


async def test_a_kept_group_ends_a_streak_of_filtered_ones() -> None:
    def decide(group: Group) -> FilterDecision:
        return FilterDecision(keep=group.prompt_index % 8 == 7, reason="dull")

    worker = build(Policy(), batch=4, group_filter=decide, max_filtered_in_a_row=16)
    await worker.start(0)
    batch = await worker.collect(4, train_version=0)
    assert indices(batch.groups) == [7, 15, 23, 31], "28 were filtered, never 16 in a row"
    await worker.close()


async def test_a_broken_source_or_filter_ends_the_run() -> None:
    worker = build(Policy())
    worker._source.next = lambda: 1 / 0
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="task source failed: ZeroDivisionError"):
        await worker.collect(2, train_version=0)
    worker = build(Policy(), group_filter=lambda g: 1 / 0)
    await worker.start(0)
    with pytest.raises(RolloutDiedError, match="ZeroDivisionError"):
        await worker.collect(2, train_version=0)
    await worker.close()


async def test_no_progress_is_reported() -> None:
    async def hang(*_: int) -> None:
        await asyncio.Event().wait()

    worker = build(Policy(hang), no_progress_s=0.05)
    await worker.start(0)
    with pytest.raises(DeadlineExceededError, match=r"4 trajectories in flight, 0 groups ready"):
        await worker.collect(2, train_version=0)
    await worker.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda task, member: [],
        lambda task, member: [trajectory(task.prompt_index + 1, member)],
        lambda task, member: [trajectory(task.prompt_index, member + 1)],
        lambda task, member: "nonsense",
        lambda task, member: None,
    ],
)
async def test_a_generate_that_returns_nonsense_fails_its_member(make) -> None:
    async def generate(task: Task, member: int, attempt: int):
        return make(task, member) if task.prompt_index == 0 else [trajectory(task.prompt_index, member)]

    worker = build(generate)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert worker.metrics()["rollout/errors/InvalidFieldError"] == 2
    await worker.close()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [([1.0], "1 rewards for 2"), ([1.0, float("nan")], "nan"), ([1.0, "good"], "str"), (None, "TypeError")],
)
async def test_a_bad_group_reward_fails_its_group(rewards, message: str) -> None:
    reasons = []

    def bad(task: Task, members: Sequence[Trajectory]):
        return rewards if task.prompt_index == 0 else [0.0] * len(members)

    worker = build(Policy(), group_reward=bad)
    judge = worker._buffer.judge
    worker._buffer.judge = lambda g: reasons.extend(t.error for t in g) or judge(g)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    assert any(message in (e or "") for e in reasons)
    assert worker.metrics()["rollout/errors/group_reward"] >= 1
    await worker.close()


async def test_aborted_trajectories_are_failures() -> None:
    async def generate(task: Task, member: int, attempt: int) -> list[Trajectory]:
        status = Status.ABORTED if task.prompt_index == 0 else Status.FINISHED
        return [trajectory(task.prompt_index, member, status=status)]

    worker = build(generate)
    await worker.start(0)
    assert indices((await worker.collect(2, train_version=0)).groups) == [1, 2]
    await worker.close()
