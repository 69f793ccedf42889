"""Hypothesis strategies for valid values of the vocabulary."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from miles_contracts import (
    Group,
    RoutingTrace,
    SamplingTransform,
    Status,
    Trajectory,
    TrajectoryIdentity,
    Turn,
    VersionSpan,
)

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def routing_traces(draw: st.DrawFn, rows: int | None = None) -> RoutingTrace:
    num_experts = draw(st.sampled_from([1, 2, 8, 256, 257, 65536, 65537]))
    shape = (rows if rows is not None else draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    seed = draw(st.integers(0, 2**32 - 1))
    ids = np.random.default_rng(seed).integers(0, num_experts, size=shape)
    return RoutingTrace.of(ids, num_experts)


@st.composite
def trajectories(draw: st.DrawFn, prompt_index: int = 0, member: int = 0, leaf: int = 0) -> Trajectory:
    kinds = draw(st.lists(st.sampled_from("psm"), max_size=24))  # prompt, sampled, sampled and masked out
    n = len(kinds)
    sampled = np.array([k != "p" for k in kinds], dtype=np.bool_)
    spans: list[VersionSpan] = []
    for i in range(n):
        if not sampled[i]:
            continue
        if spans and spans[-1].end == i and draw(st.booleans()):
            spans[-1] = VersionSpan(start=spans[-1].start, end=i + 1, version=spans[-1].version)
        else:
            version = draw(st.none() | st.integers(0, 2**40))
            spans.append(VersionSpan(start=i, end=i + 1, version=version))
    logprobs = np.full(n, np.nan, dtype=np.float32)
    logprobs[sampled] = [-draw(st.floats(0, 1e4, width=32)) for _ in range(int(sampled.sum()))]
    return Trajectory(
        identity=TrajectoryIdentity(
            prompt_index=prompt_index, member=member, leaf=leaf, attempt=draw(st.integers(0, 3)), session_id="s"
        ),
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), dtype=np.int32),
        loss_mask=np.array([k == "s" for k in kinds], dtype=np.bool_),
        logprobs=logprobs,
        version_spans=tuple(spans),
        status=draw(st.sampled_from(Status)),
        sampling=SamplingTransform(temperature=draw(st.floats(0, 4)), top_k=draw(st.sampled_from([-1, 1, 50]))),
        turns=(Turn(start=0, end=n, finish_reason="stop"),) if draw(st.booleans()) else (),
        reward=draw(st.none() | finite),
        routing=draw(st.none() | routing_traces(rows=max(n - 1, 0))),
        metrics=draw(st.dictionaries(st.text(max_size=5), finite, max_size=3)),
        metadata=draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
        error=draw(st.none() | st.text(max_size=10)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt_index = draw(st.integers(0, 2**40))
    members = sorted(draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=4)))
    return Group(
        prompt_index=prompt_index,
        size=4,
        trajectories=tuple(draw(trajectories(prompt_index, m, leaf)) for m, leaf in members),
        attempt=draw(st.integers(0, 3)),
        metadata=draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    )
