"""A trained token that is not what the engine said is found, wherever it changed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_toy.groups import answer, group, trajectory

from miles_contracts import Group, InvalidFieldError, wire
from miles_loop.audit import EngineRecords
from miles_loop.trainer_link import turn_digest


def digests(groups: list[Group]) -> list[list[str]]:
    """What an honest trainer process answers."""
    received = wire.decode(wire.encode(groups), list[Group])
    return [[turn_digest(t, turn.start, turn.end) for turn in t.turns] for g in received for t in g]


def recorded(counts: tuple[int, ...] = (4, 0, 7)) -> tuple[EngineRecords, Group]:
    """A group whose answers are recorded."""
    records = EngineRecords()
    made, answers = group(5, counts)
    for one in answers:
        assert one.request_id is not None
        records.add(one.request_id, one)
    return records, made


def replaced(made: Group, member: int, **fields: np.ndarray) -> Group:
    """The group with arrays of one member changed."""
    members = list(made.trajectories)
    members[member] = members[member].replace(**fields)
    return msgspec.structs.replace(made, trajectories=tuple(members))


def test_an_honest_batch_has_no_mismatch_and_its_records_are_dropped() -> None:
    records, made = recorded()
    assert records.tokens_sampled == 11
    report = records.audit([made], digests([made]))
    assert (report.tokens_trained, report.mismatches, report.example) == (11, 0, "")
    assert len(records) == 0


@given(st.integers(0, 6))
def test_a_changed_id_is_found_where_it_is(position: int) -> None:
    records, made = recorded()
    ids = made.trajectories[2].token_ids.copy()
    ids[3 + position] += 1
    changed = replaced(made, 2, token_ids=ids)
    report = records.audit([changed], digests([changed]))
    assert report.mismatches == 1
    assert f"token {3 + position}: differs from the engine's answer" in report.example


def test_a_log_prob_that_lost_its_last_bit_is_found() -> None:
    records, made = recorded()
    logprobs = made.trajectories[0].logprobs.copy()
    logprobs[4] = np.nextafter(logprobs[4], np.float32(-1))
    changed = replaced(made, 0, logprobs=logprobs)
    assert records.audit([changed], digests([changed])).mismatches == 1


def test_a_change_on_the_way_to_the_trainer_is_found() -> None:
    records, made = recorded()
    told = digests([made])
    told[2] = ["xxh3_128:0"]
    report = records.audit([made], told)
    assert report.mismatches == 7
    assert "reached the trainer changed" in report.example


def test_a_token_without_a_record_is_a_mismatch() -> None:
    records, made = recorded()
    unknown = trajectory(answer("nobody", 3), index=5, member=0)
    changed = msgspec.structs.replace(made, trajectories=(unknown, *made.trajectories[1:]))
    report = records.audit([changed], digests([changed]))
    assert report.mismatches == 3
    assert "no engine record of request 'nobody'" in report.example


def test_a_turn_may_keep_the_head_of_an_answer() -> None:
    records = EngineRecords()
    whole = answer("cut", 8)
    records.add("cut", whole)
    head = msgspec.structs.replace(
        whole,
        output_ids=whole.output_ids[:5],
        logprobs=whole.logprobs[:5],
        version_spans=answer("cut", 5).version_spans,
    )
    made = Group(prompt_index=0, size=1, trajectories=(trajectory(head),))
    assert records.audit([made], digests([made])).mismatches == 0


def test_masked_tokens_do_not_count() -> None:
    records, made = recorded()
    ids, mask = made.trajectories[0].token_ids.copy(), made.trajectories[0].loss_mask.copy()
    ids[3] += 1
    mask[3] = False
    changed = replaced(made, 0, token_ids=ids, loss_mask=mask)
    report = records.audit([changed], digests([changed]))
    assert (report.tokens_trained, report.mismatches) == (10, 0)


def test_the_record_is_a_copy() -> None:
    records = EngineRecords()
    said = answer("x", 3)
    records.add("x", said)
    made = Group(prompt_index=0, size=1, trajectories=(trajectory(said),))
    said.output_ids[0] += 1
    assert records.audit([made], digests([made])).mismatches == 0


def test_an_answer_for_another_batch_is_refused() -> None:
    records, made = recorded()
    with pytest.raises(InvalidFieldError, match="trainer digests"):
        records.audit([made], digests([made])[:-1])
    with pytest.raises(InvalidFieldError, match="1 turns"):
        records.audit([made], [[], [], []])


def test_what_is_too_old_to_be_trained_is_forgotten() -> None:
    records = EngineRecords()
    for version in range(4):
        records.add(f"v{version}", answer(f"v{version}", 2, version))
    records.prune(2)
    assert len(records) == 2
    assert records.num_bytes == 2 * 2 * 8


def test_records_survive_a_checkpoint() -> None:
    records, made = recorded()
    records.add("other", answer("other", 3))
    restored = EngineRecords()
    restored.restore(wire.decode(wire.encode(records.state([made])), dict))  # type: ignore[type-var]
    assert len(restored) == 3
    assert restored.audit([made], digests([made])).mismatches == 0
