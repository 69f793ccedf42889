"""Filters keep what can teach and name what cannot."""

from __future__ import annotations

import sys
import types

import pytest
from rollout_factories import group

from miles_contracts import FilterDecision, InvalidFieldError
from miles_rollout.filters import all_of, reward_variance, user_filter
from miles_rollout.imports import load_object


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("user_filters_for_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.3,), False), ((None, None), False), ((0.1, 0.1 + 1e-12), False)],
)
def test_reward_variance(rewards: tuple, keep: bool) -> None:
    decision = reward_variance()(group(0, rewards=rewards))
    assert decision.keep is keep
    assert decision.reason == ("" if keep else "zero_reward_variance")


def test_reward_variance_refuses_a_bad_minimum() -> None:
    with pytest.raises(InvalidFieldError, match="minimum"):
        reward_variance(-1.0)


def test_first_refusal_gives_the_reason() -> None:
    no = FilterDecision(keep=False, reason="too easy")
    both = all_of([reward_variance(), lambda g: no])
    assert both(group(0)) == no
    assert both(group(0, rewards=(1.0, 1.0))).reason == "zero_reward_variance"
    assert all_of([])(group(0)).keep


def test_user_filter_by_import_path(module: types.ModuleType) -> None:
    module.only_even = lambda g: g.prompt_index % 2 == 0
    module.named = lambda g: FilterDecision(keep=False, reason="named reason")
    module.silent = lambda g: FilterDecision(keep=False)
    module.wrong = lambda g: 3
    even = user_filter("user_filters_for_test:only_even")
    assert even(group(0)).keep
    assert even(group(1)) == FilterDecision(keep=False, reason="only_even")
    assert user_filter("user_filters_for_test:named")(group(0)).reason == "named reason"
    assert user_filter("user_filters_for_test:silent")(group(0)).reason == "silent"
    with pytest.raises(InvalidFieldError, match="FilterDecision or a bool"):
        user_filter("user_filters_for_test:wrong")(group(0))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "package.module:name"),
        (":name", "package.module:name"),
        ("nosuchmodule_x:f", "no module nosuchmodule_x"),
        ("os.nosuch:f", "no module os.nosuch"),
        ("os:nosuch", "has no nosuch"),
        ("os:sep", "is a str, not a function"),
    ],
)
def test_bad_import_paths_say_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        load_object(path, field="filter")


def test_an_error_inside_the_users_module_is_passed_on(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_user_module.py").write_text("import surely_not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"):
        load_object("broken_user_module:f", field="filter")
