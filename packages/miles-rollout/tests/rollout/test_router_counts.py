"""Windows of a router's counts add up to its totals, whatever engines come in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_rollout.router.counts import EngineCounts, RouterCounts

turns = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(0, 50)), max_size=20)


@given(st.lists(turns, min_size=1, max_size=5))
def test_windows_add_up_to_the_totals(windows: list[list[tuple[int, int, int]]]) -> None:
    """Engine 3 is only known once it has answered."""
    engines: list[EngineCounts] = [EngineCounts()] * 2
    taken = RouterCounts(engines=tuple(engines))
    total_turns = total_prompt = total_cached = 0
    for number, window in enumerate(windows, start=1):
        for engine, prompt, cached in window:
            engines += [EngineCounts()] * (engine + 1 - len(engines))
            was = engines[engine]
            engines[engine] = EngineCounts(was.turns + 1, was.prompt_tokens + prompt, was.cached_tokens + cached)
        now = RouterCounts(reissued=2 * number, quarantines=number, engines=tuple(engines))
        done, taken = now.since(taken), now
        assert (done.reissued, done.quarantines) == (2, 1)
        total_turns += sum(e.turns for e in done.engines)
        total_prompt += sum(e.prompt_tokens for e in done.engines)
        total_cached += sum(e.cached_tokens for e in done.engines)
    answered = [turn for window in windows for turn in window]
    assert total_turns == len(answered)
    assert total_prompt == sum(prompt for _, prompt, _ in answered)
    assert total_cached == sum(cached for _, _, cached in answered)


def test_rates_are_left_out_where_nothing_was_said() -> None:
    counts = RouterCounts(engines=(EngineCounts(3, 100, 75), EngineCounts(2, 0, 0)))
    assert counts.metrics() == {
        "router/reissued_turns": 0,
        "router/quarantines": 0,
        "router/engine_0/turns": 3,
        "router/engine_0/prefix_cache_hit_rate": 0.75,
        "router/engine_1/turns": 2,
        "rollout/prefix_cache_hit_rate": 0.75,
    }
