"""Any reasoning-gym family; training and held-out items never share a seed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_contracts import InvalidFieldError
from miles_rollout.rewards import ReasoningGymReward
from miles_rollout.tasks import ReasoningGymTasks, Split
from miles_rollout.tasks.gym import first_seed

pytest.importorskip("reasoning_gym")


@given(
    a=st.integers(0, 2**40),
    b=st.integers(0, 2**40),
    n=st.integers(1, 2**29),
    m=st.integers(1, 2**29),
)
def test_splits_share_no_seed(a: int, b: int, n: int, m: int) -> None:
    train, held = first_seed(a, n, Split.TRAIN), first_seed(b, m, Split.HELD_OUT)
    assert train >= 0
    assert train + n <= 2**30 <= held
    assert held + m <= 2**31


def test_items_come_from_the_family_itself() -> None:
    import reasoning_gym

    tasks = ReasoningGymTasks("basic_arithmetic", seed=4, size=20, shuffle=False)
    entries = reasoning_gym.create_dataset("basic_arithmetic", seed=first_seed(4, 20, Split.TRAIN), size=20)
    for index in range(20):
        task = tasks.next()
        assert task.messages[-1].content == entries[index]["question"]
        assert task.label == entries[index]["answer"]
        assert task.source == "basic_arithmetic"
        json.dumps(task.metadata)


def test_same_seed_same_tasks_and_resume() -> None:
    a, b = (ReasoningGymTasks("spell_backward", seed=1, size=10) for _ in range(2))
    first = [a.next() for _ in range(25)]
    b.restore({**b.state(), "next": 13})
    assert [b.next() for _ in range(12)] == first[13:]
    assert ReasoningGymTasks("spell_backward", seed=2, size=10).at(0) != first[0]


def test_template_and_system_prompt() -> None:
    tasks = ReasoningGymTasks(
        "spell_backward", size=5, template="Q: {question}\nUse <answer> tags.", system_prompt="You spell."
    )
    system, user = tasks.at(0).messages
    assert (system.role, system.content) == ("system", "You spell.")
    assert user.content is not None
    assert user.content.startswith("Q: ")


@pytest.mark.parametrize("name", ["basic_arithmetic", "spell_backward", "countdown", "mini_sudoku", "letter_counting"])
def test_verifier_gives_the_reference_answer_full_marks(name: str) -> None:
    tasks, reward = ReasoningGymTasks(name, size=5), ReasoningGymReward()
    for index in range(5):
        task = tasks.at(index)
        # countdown has no single answer; its verifier evaluates the expression that comes with the entry.
        answer = task.label or task.metadata["reasoning_gym"]["entry"]["metadata"]["expression"]
        assert reward(task, str(answer)) == 1.0
        assert reward(task, f"I think so.\n<answer>{answer}</answer>") == 1.0
        assert reward(task, "no idea at all") < 0.5


def test_verifier_uses_the_configuration_of_the_task() -> None:
    tasks = ReasoningGymTasks("basic_arithmetic", size=5, config={"min_digits": 1, "max_digits": 1, "max_terms": 2})
    assert ReasoningGymReward()(tasks.at(0), str(tasks.at(0).label)) == 1.0


def test_a_missing_tag_can_be_required() -> None:
    task = ReasoningGymTasks("spell_backward", size=5).at(0)
    strict = ReasoningGymReward(require_tag=True)
    assert strict(task, str(task.label)) < 1.0
    assert strict(task, f"<answer>{task.label}</answer>") == 1.0


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(InvalidFieldError, match="did you mean basic_arithmetic"):
        ReasoningGymTasks("basic_aritmetic")
    with pytest.raises(InvalidFieldError, match=r"there are \d+ families, for example \w+, "):
        ReasoningGymTasks("qqqqqqq")


@pytest.mark.parametrize(
    ("config", "message"),
    [({"max_digitz": 3}, "max_digitz"), ({"min_digits": 5, "max_digits": 2}, "refuses"), ({"seed": 3}, "own argument")],
)
def test_bad_options_are_refused(config: dict, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        ReasoningGymTasks("basic_arithmetic", config=config)


@pytest.mark.parametrize(("size", "template"), [(0, "{question}"), (2**29 + 1, "{question}"), (5, "no place")])
def test_bad_size_and_template_are_refused(size: int, template: str) -> None:
    with pytest.raises(InvalidFieldError):
        ReasoningGymTasks("basic_arithmetic", size=size, template=template)


def test_restore_refuses_another_configuration() -> None:
    a = ReasoningGymTasks("basic_arithmetic", size=5)
    for other in (
        ReasoningGymTasks("basic_arithmetic", size=5, config={"max_digits": 2, "min_digits": 1}),
        ReasoningGymTasks("basic_arithmetic", size=5, split=Split.HELD_OUT),
        ReasoningGymTasks("spell_backward", size=5),
    ):
        with pytest.raises(InvalidFieldError, match="fingerprint"):
            other.restore(a.state())


def test_reward_refuses_foreign_tasks() -> None:
    task = ReasoningGymTasks("spell_backward", size=5).at(0)
    import msgspec

    with pytest.raises(InvalidFieldError, match="reasoning_gym"):
        ReasoningGymReward()(msgspec.structs.replace(task, metadata={}), "x")
