"""One prompt, one answer, one reward: lengths, endings and failures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_factories import BytesRenderer, CountingTasks, MemoryEngine

from miles_contracts import (
    GenerateResult,
    InvalidFieldError,
    SamplingParams,
    Status,
    TrajectoryIdentity,
    VersionSpan,
)
from miles_rollout.generate import PromptTooLongError, check_prompt_lengths, derive_seed, single_turn
from miles_rollout.generate.trajectories import single_generation, status_of
from miles_rollout.router import Router

TASK = CountingTasks().at(7)
PROMPT = [b + 1 for b in b"prompt 7"]


class Scripted(MemoryEngine):
    """Answers what it is told to."""

    answer: GenerateResult

    async def generate(self, input_ids, params, *, request_id=None, routing=False, routing_start=0) -> GenerateResult:
        self.served.append((tuple(input_ids), params))
        return self.answer


def result(ids=(5, 6, 0), reason: str = "stop", **fields) -> GenerateResult:
    count = len(ids)
    spans = (VersionSpan(start=0, end=count, version=3),) if count else ()
    return GenerateResult(
        **{
            "output_ids": np.array(ids, dtype=np.int32),
            "logprobs": np.full(count, -0.5, dtype=np.float32),
            "version_spans": spans,
            "finish_reason": reason,
            "cached_tokens": 2,
        }
        | fields
    )


async def run(answer: GenerateResult, reward=lambda task, text: 1.0, **options):
    engine = Scripted("http://e")
    engine.answer = answer
    generate = single_turn(
        **{
            "renderer": BytesRenderer(),
            "router": Router([engine]),
            "reward": reward,
            "sampling": SamplingParams(max_new_tokens=8, temperature=0.7),
            "run_seed": 1,
        }
        | options
    )
    (trajectory,) = await generate(TASK, 1, 2)
    return trajectory, engine


async def test_a_whole_trajectory() -> None:
    seen = []
    trajectory, engine = await run(result([98, 99, 0]), reward=lambda task, text: seen.append((task, text)) or 0.5)
    assert trajectory.token_ids.tolist() == [*PROMPT, 98, 99, 0]
    assert trajectory.loss_mask.tolist() == [False] * 8 + [True] * 3
    assert np.isnan(trajectory.logprobs[:8]).all()
    assert trajectory.logprobs[8:].tolist() == [-0.5] * 3
    assert trajectory.version_spans == (VersionSpan(start=8, end=11, version=3),)
    assert trajectory.identity == TrajectoryIdentity(prompt_index=7, member=1, attempt=2)
    assert (trajectory.status, trajectory.reward) == (Status.FINISHED, 0.5)
    assert trajectory.sampling.temperature == 0.7
    assert (trajectory.turns[0].start, trajectory.turns[0].end, trajectory.turns[0].cached_tokens) == (8, 11, 2)
    assert seen == [(TASK, "ab")]
    assert trajectory.metadata == {"response": "ab"}
    asked = engine.served[0][1]
    assert asked.seed == derive_seed(1, 7, 1, 2)
    assert asked.stop_token_ids == (0,)
    assert asked.max_new_tokens == 8


@pytest.mark.parametrize(
    ("ids", "reason", "status"),
    [
        ((5, 6, 0), "stop", Status.FINISHED),
        ((5, 6), "stop", Status.FINISHED),  # a stop string
        ((5,) * 8, "length", Status.TRUNCATED),
        ((5,) * 7 + (0,), "length", Status.FINISHED),  # its stop token was the last one allowed
        ((5,) * 3, "length", Status.TRUNCATED),  # the engine's own context limit
        ((5, 6), "abort", Status.ABORTED),
    ],
)
async def test_endings(ids, reason: str, status: Status) -> None:
    trajectory, _ = await run(result(ids, reason))
    assert trajectory.status is status
    assert (trajectory.reward is None) == (status is Status.ABORTED), "an aborted answer is not scored"


def test_an_ignored_stop_token_does_not_finish() -> None:
    params = SamplingParams(max_new_tokens=2, stop_token_ids=(0,), ignore_eos=True)
    assert status_of(result((5, 0), "length"), params) is Status.TRUNCATED


async def test_an_empty_answer_is_a_trajectory_without_sampled_tokens() -> None:
    trajectory, _ = await run(result(()), reward=lambda task, text: float(len(text)))
    assert (trajectory.num_sampled, trajectory.num_trained, trajectory.reward) == (0, 0, 0.0)
    assert trajectory.token_ids.tolist() == PROMPT


async def test_the_answer_gets_what_the_prompt_leaves() -> None:
    _, engine = await run(result(), max_tokens=12)
    assert engine.served[0][1].max_new_tokens == 4
    with pytest.raises(PromptTooLongError, match="prompt 7 of '' alone has 8 tokens"):
        await run(result(), max_tokens=8)


def test_prompts_are_checked_before_anything_starts() -> None:
    assert check_prompt_lengths(CountingTasks(), BytesRenderer(), max_tokens=20, limit=11) == len("prompt 10")
    with pytest.raises(PromptTooLongError, match="prompt 10 .* alone has 9 tokens"):
        check_prompt_lengths(CountingTasks(), BytesRenderer(), max_tokens=9, limit=20)


async def test_an_empty_prompt_is_refused() -> None:
    class Silent(BytesRenderer):
        def render(self, *args, **kwargs) -> list[int]:
            return []

    with pytest.raises(PromptTooLongError, match="rendered to no tokens"):
        await run(result(), renderer=Silent())


async def test_a_reward_that_fails_fails_the_trajectory() -> None:
    trajectory, _ = await run(result(), reward=lambda task, text: float("nan"))
    assert trajectory.status is Status.FAILED
    assert trajectory.reward is None
    assert "nan" in (trajectory.error or "")
    assert trajectory.num_sampled == 3, "what was sampled is kept for people"


async def test_without_a_reward_it_stays_unscored() -> None:
    trajectory, _ = await run(result(), reward=None, keep_text=False)
    assert trajectory.reward is None
    assert trajectory.status is Status.FINISHED
    assert trajectory.metadata == {}


async def test_routing_is_attached_when_asked_for() -> None:
    routes = np.arange(10 * 2 * 2).reshape(10, 2, 2) % 4
    trajectory, _ = await run(result(routing=routes), routing=True, num_experts=4)
    assert trajectory.routing is not None
    assert trajectory.routing.expert_ids.tolist() == routes.tolist()
    assert trajectory.routing.num_experts == 4
    with pytest.raises(InvalidFieldError, match="num_experts"):
        await run(result(), routing=True)
    with pytest.raises(InvalidFieldError, match="expert_ids"):
        await run(result(routing=routes + 9), routing=True, num_experts=4)


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (result(logprobs=np.zeros(2, dtype=np.float32)), "logprobs"),
        (result(version_spans=()), "version_spans"),
        (result(version_spans=(VersionSpan(start=0, end=2, version=1),)), "version_spans"),
        (result(logprobs=np.full(3, np.nan, dtype=np.float32)), "logprobs"),
        (result(ids=(5, -1, 0)), "token_ids"),
    ],
)
async def test_an_answer_that_contradicts_itself_is_refused(answer: GenerateResult, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        await run(answer)


async def test_a_large_group_is_spread_over_the_engines() -> None:
    engines = [Scripted(f"http://e{i}") for i in range(2)]
    for engine in engines:
        engine.answer = result()
    generate = single_turn(
        renderer=BytesRenderer(),
        router=Router(engines),
        reward=None,
        sampling=SamplingParams(max_new_tokens=8),
        run_seed=1,
        siblings=3,
    )
    for member in range(12):
        await generate(TASK, member, 0)
    assert [len(e.served) for e in engines] == [6, 6]


async def test_bad_options_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="siblings"):
        await run(result(), siblings=0)
    with pytest.raises(InvalidFieldError, match="max_tokens"):
        await run(result(), max_tokens=1)


def test_a_weight_update_in_the_middle_is_two_spans() -> None:
    spans = (VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=3, version=4))
    trajectory = single_generation(
        identity=TrajectoryIdentity(prompt_index=0, member=0),
        prompt_ids=[9, 9],
        result=result(version_spans=spans),
        params=SamplingParams(),
    )
    assert trajectory.version_spans == (
        VersionSpan(start=2, end=3, version=3),
        VersionSpan(start=3, end=5, version=4),
    )
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 4)


@given(
    a=st.tuples(*[st.integers(0, 10**6)] * 5),
    b=st.tuples(*[st.integers(0, 10**6)] * 5),
)
def test_seeds_depend_on_everything(a, b) -> None:
    assert 0 <= derive_seed(*a) < 2**31
    if a != b:
        assert derive_seed(*a) != derive_seed(*b)


def test_seeds_never_change() -> None:
    # Golden: blake2b of the five little-endian numbers; a change would make resumed runs sample differently.
    assert [derive_seed(0, 0, 0, 0), derive_seed(1, 2, 3, 4, 5)] == [1795677458, 180694457]


async def test_the_members_of_a_group_share_one_rendering() -> None:
    rendered: list[str] = []

    class Counting(BytesRenderer):
        def render(self, messages, *args, **kwargs) -> list[int]:
            rendered.append(messages[0].content)
            return super().render(messages, *args, **kwargs)

    engine = MemoryEngine("http://e")
    generate = single_turn(
        renderer=Counting(), router=Router([engine]), reward=None, sampling=SamplingParams(), run_seed=1
    )
    other = CountingTasks().at(8)
    made = [await generate(task, member, 0) for task in (TASK, other, TASK) for member in range(3)]
    assert rendered == ["prompt 7", "prompt 8", "prompt 7"]
    prompts = [bytes(i - 1 for i in t.token_ids[: len(PROMPT)].tolist()).decode() for (t,) in made]
    assert prompts == ["prompt 7"] * 3 + ["prompt 8"] * 3 + ["prompt 7"] * 3
