"""A trained token that is not what the engine said is found, wherever it changed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_toy.groups import answer, group, trajectory

from miles_contracts import GenerateResult, Group, InvalidFieldError, RoutingTrace, Turn, VersionSpan, row_digests, wire
from miles_loop.audit import EngineRecords, RecordingEngine
from miles_loop.trainer_link import route_digests, turn_digest


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


def routed(cuts: tuple[int, ...] = (0, 9), whole: bool = False) -> tuple[EngineRecords, Group, np.ndarray]:
    """One trajectory of 14 tokens in turns, its routes, and the records of the answers.

    Args:
        cuts: first row that each answer holds; the turns end at the next cut + 1, the last at 14.
        whole: every answer holds the rows of all its tokens, as of an engine that cannot leave any out.
    """
    ids = np.random.default_rng(0).integers(0, 8, (13, 2, 2))
    made = trajectory(answer("x", 11), index=5)
    turns, records = [], EngineRecords()
    for i, cut in enumerate(cuts):
        end = cuts[i + 1] + 1 if i + 1 < len(cuts) else 14
        start = 3 if i == 0 else cut + 2
        turns.append(Turn(start=start, end=end, finish_reason="stop", request_id=f"r{i}"))
        said = GenerateResult(
            output_ids=made.token_ids[start:end],
            logprobs=made.logprobs[start:end],
            version_spans=(VersionSpan(start=0, end=end - start, version=0),),
            finish_reason="stop",
            request_id=f"r{i}",
        )
        first = 0 if whole else cut
        records.add(f"r{i}", said, first_row=first, rows=row_digests(ids[first : end - 1]))
    member = made.replace(turns=tuple(turns), routing=RoutingTrace.of(ids, 8))
    return records, Group(prompt_index=5, size=1, trajectories=(member,)), ids


def rerouted(made: Group, ids: np.ndarray) -> Group:
    return msgspec.structs.replace(made, trajectories=(made.trajectories[0].replace(routing=RoutingTrace.of(ids, 8)),))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cuts", [(0,), (0, 9), (0, 5, 9)])
def test_honest_routes_of_any_number_of_turns_have_no_mismatch(cuts: tuple[int, ...], whole: bool) -> None:
    records, made, _ = routed(cuts, whole)
    report = records.audit([made], digests([made]), route_digests([made]))
    assert (report.routes_audited, report.route_mismatches, report.route_example) == (13, 0, "")


@given(st.integers(0, 12), st.integers(0, 1), st.integers(0, 1))
def test_one_changed_expert_is_found_where_it_is(row: int, layer: int, place: int) -> None:
    records, made, ids = routed()
    wrong = ids.copy()
    wrong[row, layer, place] = (wrong[row, layer, place] + 1) % 8
    changed = rerouted(made, wrong)
    report = records.audit([changed], digests([changed]), route_digests([changed]))
    assert (report.routes_audited, report.route_mismatches) == (13, 1)
    assert report.route_example == f"prompt 5, routes of token {row}"


def test_rows_of_another_turn_are_not_taken_for_those_that_sampled() -> None:
    """A later prefill of the same tokens is no record of the routes that sampled them."""
    records, made, ids = routed((0, 9), whole=True)
    other = ids.copy()
    other[:9] = (other[:9] + 1) % 8
    restated = GenerateResult(
        output_ids=made.trajectories[0].token_ids[11:14],
        logprobs=made.trajectories[0].logprobs[11:14],
        version_spans=(VersionSpan(start=0, end=3, version=0),),
        finish_reason="stop",
        request_id="r1",
    )
    records.add("r1", restated, first_row=0, rows=row_digests(other))
    assert records.audit([made], digests([made]), route_digests([made])).route_mismatches == 0
    records, made, ids = routed((0, 9), whole=True)
    records.add("r1", restated, first_row=0, rows=row_digests(other))
    changed = rerouted(made, other)
    report = records.audit([changed], digests([changed]), route_digests([changed]))
    assert report.route_mismatches == 9


def test_routes_without_a_record_or_that_the_trainer_did_not_see_are_mismatches() -> None:
    records, made, ids = routed()
    assert records.audit([made], digests([made])).route_mismatches == 13
    records, made, _ = routed()
    records.add("r1", answer("r1", 3))
    assert records.audit([made], digests([made]), route_digests([made])).route_mismatches == 4
    # the engine said more than the trajectory kept: what was kept is right
    records, made, _ = routed()
    head = made.trajectories[0]
    head = head.replace(
        token_ids=head.token_ids[:13],
        loss_mask=head.loss_mask[:13],
        logprobs=head.logprobs[:13],
        version_spans=(VersionSpan(start=3, end=13, version=0),),
        turns=(head.turns[0], msgspec.structs.replace(head.turns[1], end=13)),
        routing=RoutingTrace.of(ids[:12], 8),
    )
    kept = msgspec.structs.replace(made, trajectories=(head,))
    report = records.audit([kept], digests([kept]), route_digests([kept]))
    assert (report.routes_audited, report.route_mismatches) == (12, 0)
    with pytest.raises(InvalidFieldError, match="trainer routes"):
        records.audit([kept], digests([kept]), [])


def test_records_of_routes_survive_a_checkpoint() -> None:
    records, made, _ = routed()
    again = EngineRecords()
    again.restore(wire.decode(wire.encode(records.state([made])), dict[str, list]))
    assert again.num_bytes == records.num_bytes
    assert again.audit([made], digests([made]), route_digests([made])).route_mismatches == 0
    old = EngineRecords()
    old.restore({"a": [np.arange(2), np.zeros(2), 3]})  # a record from before routes were audited
    assert len(old) == 1


async def test_the_recording_engine_keeps_the_digests_of_the_rows_it_asked_for() -> None:
    ids = np.random.default_rng(0).integers(0, 8, (700, 2, 2))

    class Said:
        url = "fake"

        async def generate(self, *_: object, routing_start: int = 0, **__: object) -> GenerateResult:
            return msgspec.structs.replace(answer("r", 4), routing=ids[routing_start:], routing_s=2.0)

    records = EngineRecords()
    await RecordingEngine(Said(), records).generate([1] * 697, None, request_id="r", routing=True, routing_start=9)
    (stored,) = records._records.values()
    assert stored.first_row == 9
    assert 2.0 < records.take_capture_s() < 3.0  # the engine's part and our own
    assert records.take_capture_s() == 0.0
    assert np.array_equal(stored.rows, row_digests(ids)[9:])
