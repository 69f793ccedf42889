"""Names of rewards become rewards, and what cannot work is refused by name."""

from __future__ import annotations

import pytest

from miles_contracts import InvalidFieldError, Message, Task, Trajectory
from miles_loop.config import RewardScope, TaskConfig
from miles_loop.scoring import Counting, CountingService, make_scoring, task_scoring
from miles_rollout.rewards import CodeReward, ExactMatch, MathMatch, RemoteReward, UserReward, score
from miles_rollout.rewards.remote import RemoteRewardError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("exact", ExactMatch),
        ("maths", MathMatch),
        ("code", CodeReward),
        ("http://127.0.0.1:9/score", RemoteReward),
        ("loop_toy.recipe:vowels", UserReward),
    ],
)
async def test_a_name_is_a_reward(name: str, kind: type) -> None:
    if name == "maths":
        pytest.importorskip("math_verify")
    scoring = make_scoring(name, RewardScope.ANSWER, field="task.reward")
    assert isinstance(scoring.answer, kind)
    assert scoring.group is None
    await scoring.close()


async def test_code_is_run_against_the_tests_of_its_task() -> None:
    scoring = make_scoring("code", RewardScope.ANSWER, field="task.reward")
    assert scoring.answer is not None
    message = Message(role="user", content="add two numbers")
    task = Task(prompt_index=0, messages=(message,), metadata={"tests": ["assert add(1, 2) == 3"]})
    for program, reward in (("def add(a, b):\n    return a + b", 1.0), ("def add(a, b):\n    return a", 0.0)):
        outcome = await score(scoring.answer, task, program)
        if outcome.error is not None and "isolat" in outcome.error:
            pytest.skip(outcome.error)
        assert outcome.value == reward


def test_a_group_function_scores_groups_and_eval_may_score_answers() -> None:
    config = TaskConfig.model_validate(
        {
            "path": "prompts.jsonl",
            "reward": "loop_toy.scores:ranks",
            "reward_scope": "group",
            "eval_reward": "exact",
        }
    )
    training, held_out = task_scoring(config, 60)
    assert (training.answer, held_out.group) == (None, None)
    assert training.group is not None
    assert isinstance(held_out.answer, ExactMatch)


@pytest.mark.parametrize(
    ("name", "scope", "said"),
    [
        ("exactt", RewardScope.ANSWER, "did you mean 'exact'"),
        ("exact", RewardScope.GROUP, "task.reward_scope"),
        ("http://host/score", RewardScope.BATCH, "task.reward_scope"),
        ("loop_toy.scores:nothing", RewardScope.GROUP, "has no nothing"),
        ("loop_toy.nowhere:fn", RewardScope.ANSWER, "no module"),
    ],
)
def test_what_cannot_score_is_refused(name: str, scope: RewardScope, said: str) -> None:
    with pytest.raises(InvalidFieldError, match=said):
        make_scoring(name, scope, field="task.reward")


async def test_a_service_has_its_share_of_the_time_for_every_try(caplog: pytest.LogCaptureFixture) -> None:
    """And answers are made as without it, with its counts among the metrics."""

    def asked(**settings: object) -> RemoteReward:
        values = {"path": "prompts.jsonl", "reward": "http://127.0.0.1:9/score"} | settings
        training, held_out = task_scoring(TaskConfig.model_validate(values), 60)
        assert held_out is training
        assert isinstance(training.answer, RemoteReward)
        return training.answer

    assert (asked().timeout_s, asked().retries) == (15.0, 3)
    assert (asked(reward_retries=1).timeout_s, asked(reward_retries=1).retries) == (30.0, 1)
    assert asked(reward_request_timeout_s=7).timeout_s == 7.0

    class Sessions:
        """Generation that counts, too."""

        async def __call__(self, task: Task, member: int, attempt: int) -> list[Trajectory]:
            await service(task, "answer")
            return []

        def take_metrics(self) -> dict[str, float]:
            return {"rollout/session/turns": 3.0}

    service = asked(reward_retries=0)
    counting = CountingService(Sessions(), service)
    with pytest.raises(RemoteRewardError, match="failed 1 times"):
        await counting(Task(prompt_index=0, messages=()), 0, 0)
    assert isinstance(counting, Counting)
    with caplog.at_level("WARNING"):
        counted = counting.take_metrics()
    assert "1 answers got no reward, the last: http://127.0.0.1:9/score failed 1 times" in caplog.text
    assert counted == {
        "rollout/session/turns": 3.0,
        "rollout/reward_service/requests": 1.0,
        "rollout/reward_service/retries": 0.0,
        "rollout/reward_service/failed": 1.0,
    }
    await service.close()
