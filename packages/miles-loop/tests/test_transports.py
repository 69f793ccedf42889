"""What engines are told by each transport, and what an SGLang that was overwritten may still do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from transport_doubles import MANIFEST, SPECS, Client, Sender, connected, sglang

from miles_contracts import (
    EngineError,
    EngineUnavailableError,
    InvalidFieldError,
    ShmTensor,
    WeightUpdateError,
)
from miles_loop.senders import make_sender
from miles_loop.sglang_weights import PARTIAL, buckets_in_flight
from miles_loop.trainer_link import SenderSettings
from miles_loop.transports import (
    PEER_GROUP,
    BroadcastTransport,
    LocalTransport,
    NotConnectedError,
    PeerTransport,
)
from miles_rollout.engine_identity import EngineKind
from miles_sync.messages import BroadcastBucket, PeerBucket, Written
from miles_sync.sglang_layout import ChecksumTable


def test_a_missing_shared_memory_folder_is_named_as_the_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"sync\.directory: got '.*nowhere'; give an existing folder"):
        make_sender(SenderSettings(transport="local", directory=str(tmp_path / "nowhere")))


def bucket(index: int = 0, *, last: bool = False) -> BroadcastBucket:
    placed = tuple(ShmTensor(spec=spec, offset=8 * i) for i, spec in enumerate(SPECS))
    return BroadcastBucket(
        group="g1",
        host="trainer",
        port=5,
        receivers=("e",),
        num_bytes=16,
        tensors=placed,
        update_id="u",
        index=index,
        last=last,
    )


async def test_a_group_is_formed_once_and_anew_when_its_members_change() -> None:
    sender, a, b = Sender(), Client("http://a"), Client("http://b")
    transport = BroadcastTransport(sender)
    await connected(transport, a, b)
    await connected(transport, a, b)
    assert sender.told == [(("http://a#0", "http://b#0"), True)]
    joins = [client.said("/init_weights_update_group") for client in (a, b)]
    assert [[j["rank_offset"] for j in joined] for joined in joins] == [[1], [2]]
    assert joins[0][0] | {"rank_offset": 0} == {
        "master_address": "trainer",
        "master_port": 5,
        "rank_offset": 0,
        "world_size": 3,
        "group_name": "g1",
        "backend": "gloo",
        "timeout_s": 9,
    }
    await connected(transport, a)
    assert sender.told[1:] == [(("http://a#0",), True)]
    assert a.said("leave") == [{"group_name": "g1"}]
    transport.reset()
    await connected(transport, a)
    assert len(sender.told) == 3


async def test_an_engine_that_does_not_join_is_named_and_the_next_attempt_starts_over() -> None:
    sender, a, b = Sender(), Client("http://a"), Client("http://b")
    b.refuse["/init_weights_update_group"] = EngineUnavailableError("http://b", "dead")
    transport = BroadcastTransport(sender)
    with pytest.raises(NotConnectedError, match="did not join") as caught:
        await connected(transport, a, b)
    assert caught.value.engine == "http://b"
    await connected(transport, a)
    assert len(sender.told) == 2
    a.refuse["identify"] = EngineUnavailableError("http://a", "dead")
    with pytest.raises(NotConnectedError, match="does not say what it is"):
        await connected(LocalTransport(), a)


async def test_the_tensor_parallel_ranks_of_sglang_are_members_and_take_whole_tensors() -> None:
    sender = Sender()
    a, s, b = Client("http://a"), sglang(tp_size=4), Client("http://b")
    await connected(BroadcastTransport(sender), a, s, b)
    assert len(sender.told[0][0]) == 6
    assert sender.told[0][1] is False
    offsets = [c.said("/init_weights_update_group")[0]["rank_offset"] for c in (a, s, b)]
    assert offsets == [1, 2, 6]
    with pytest.raises(WeightUpdateError, match="dp_size = 2"):
        await connected(BroadcastTransport(sender), sglang(dp_size=2))


async def test_digests_are_made_where_somebody_compares_them() -> None:
    sender = Sender()
    transport = BroadcastTransport(sender)
    for clients, wanted in (([sglang()], False), ([sglang(), Client("http://a")], True), ([Client("http://a")], True)):
        await connected(transport, *clients)
        assert sender.digests is wanted


async def test_only_engines_that_put_buckets_in_order_are_told_of_the_next_one_early() -> None:
    embedded, sglang = Client("http://a"), Client("http://b", EngineKind.SGLANG, tp_size=1)
    transport = BroadcastTransport(Sender())  # type: ignore[arg-type]
    assert buckets_in_flight(await transport.connect([embedded])) == 2  # type: ignore[list-item]
    assert buckets_in_flight(await transport.connect([embedded, sglang])) == 1  # type: ignore[list-item]


async def test_an_embedded_engine_is_told_which_collectives_bring_a_bucket() -> None:
    client = Client("http://a")
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.load_bucket(msgspec.structs.replace(bucket(), transfers=((0, 8), (64, 8))))
    (body,) = client.said("/update_weights_from_distributed")
    assert body["load_format"] == "miles_transfers"
    assert body["offsets"] == [0, 8]
    assert body["transfers"] == ((0, 8), (64, 8))


async def test_an_embedded_engine_is_told_the_digests_and_which_bucket_is_the_last() -> None:
    client = Client("http://a")
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.load_bucket(bucket(3, last=True))
    assert client.said("/update_weights_from_distributed") == [
        {
            "group_name": "g1",
            "names": ["a", "b"],
            "dtypes": ["float32", "float32"],
            "shapes": [[2], [2]],
            "load_format": "flattened_bucket",
            "digests": ["xxh3_128:a", "xxh3_128:b"],
            "update_id": "u",
            "index": 3,
            "last": True,
        }
    ]


async def test_peers_are_asked_for_their_memory_and_the_trainer_is_told() -> None:
    sender, a, b = Sender(), Client("http://10.0.0.1:5"), Client("http://10.0.0.2:5")
    transport = PeerTransport(sender, "miles_tcp", 30)
    engines = await connected(transport, a, b)
    await connected(transport, a, b)
    assert sender.told == [(("at http://10.0.0.1:5", "at http://10.0.0.2:5"), False)]
    asked = b.said("/init_weights_update_group")[0]
    assert (asked["master_address"], asked["rank_offset"], asked["world_size"]) == ("10.0.0.2", 2, 3)
    await engines[0].load_bucket(PeerBucket(update_id="u", index=1, written=(Written(transfer=4, digest="d"),)))
    assert a.said("/update_weights_from_distributed") == [
        {"group_name": PEER_GROUP, "update_id": "u", "index": 1, "written": ({"transfer": 4, "digest": "d"},)}
    ]
    for other in (transport, LocalTransport()):
        with pytest.raises(InvalidFieldError, match=r"sync\.transport.*broadcast or disk"):
            await connected(other, sglang())


async def test_engines_of_a_trainer_of_several_ranks_come_behind_all_of_them() -> None:
    a, b = Client("http://10.0.0.1:5"), Client("http://10.0.0.2:5")
    await connected(PeerTransport(Sender(), "miles_tcp", 30, senders=3), a, b)
    joins = [client.said("/init_weights_update_group")[0] for client in (a, b)]
    assert [(j["senders"], j["rank_offset"], j["world_size"]) for j in joins] == [(3, 3, 5), (3, 4, 5)]


async def test_sglang_has_a_version_only_before_the_first_bucket_and_after_the_commit() -> None:
    client = sglang()
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.begin_weight_update("u", MANIFEST)
    assert await engine.weight_version() == 0
    await engine.load_bucket(bucket(0))
    assert client.version == f"{PARTIAL}u"
    assert await engine.weight_version() is None
    with pytest.raises(WeightUpdateError, match="must not serve"):
        await engine.resume()
    await engine.load_bucket(bucket(1, last=True))
    flushes = [body["flush_cache"] for body in client.said("/update_weights_from_distributed")]
    assert flushes == [False, True]
    await engine.commit_weight_update("u")
    await engine.commit_weight_update("u")
    assert (await engine.weight_version(), client.session) == (7, False)
    assert len(client.said("/update_weight_version")) == 1
    await engine.resume()
    assert client.said("resume") == [{}]


async def test_sglang_goes_back_before_the_first_bucket_and_never_after_it() -> None:
    client = sglang()
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.begin_weight_update("u", MANIFEST)
    await engine.rollback_weight_update("u")
    await engine.resume()
    assert not client.session
    await engine.begin_weight_update("v", MANIFEST)
    with pytest.raises(WeightUpdateError, match="was not begun"):
        await engine.load_bucket(bucket())
    await engine.rollback_weight_update("v")
    await engine.begin_weight_update("u", MANIFEST)
    client.refuse["/update_weights_from_distributed"] = EngineError("http://s", "no such group", 400)
    with pytest.raises(EngineError, match="no such group"):
        await engine.load_bucket(bucket())
    # It may have taken part or not: from here on it counts as overwritten, and the others must not wait for it.
    assert client.said("leave") == [{"group_name": "g1"}]
    with pytest.raises(WeightUpdateError, match="cannot go back"):
        await engine.rollback_weight_update("u")
    with pytest.raises(WeightUpdateError, match="must not serve"):
        await engine.resume()


async def test_a_session_of_an_update_that_could_not_begin_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    client, sender = sglang(), Sender()
    (engine,) = await connected(BroadcastTransport(sender), client)

    async def gone(update_id: str, form: object) -> None:
        raise EngineUnavailableError("http://s", "the trainer is gone")

    monkeypatch.setattr(sender, "expect_checksums", gone)
    with pytest.raises(EngineUnavailableError):
        await engine.begin_weight_update("u", MANIFEST)
    assert client.session
    await engine.rollback_weight_update("u")
    assert not client.session
    await engine.rollback_weight_update("u")
    await engine.resume()


async def test_a_commit_whose_answer_was_lost_is_repeated_to_its_end() -> None:
    client = sglang()
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.begin_weight_update("u", MANIFEST)
    await engine.load_bucket(bucket(0, last=True))
    client.refuse["/update_weight_version"] = EngineUnavailableError("http://s", "no answer")
    with pytest.raises(EngineUnavailableError):
        await engine.commit_weight_update("u")
    client.refuse.clear()
    assert await engine.weight_version() is None
    await engine.commit_weight_update("u")
    assert await engine.weight_version() == 7


async def test_a_session_that_somebody_left_open_is_closed_first() -> None:
    client = sglang()
    client.session = True
    (engine,) = await connected(BroadcastTransport(Sender()), client)
    await engine.begin_weight_update("u", MANIFEST)
    assert client.session


async def test_sglang_engines_that_hold_different_weights_are_named_before_anybody_commits() -> None:
    first, second = sglang("http://s1"), sglang("http://s2")
    engines = await connected(BroadcastTransport(Sender()), first, second)
    second.checksums = {"w": "2"}
    for engine in engines:
        await engine.begin_weight_update("u", MANIFEST)
    await engines[0].load_bucket(bucket(0, last=True))
    with pytest.raises(WeightUpdateError, match="checksum is 2, 1 on http://s1") as caught:
        await engines[1].load_bucket(bucket(0, last=True))
    assert (caught.value.engine, caught.value.tensor) == ("http://s2", "w")


async def test_sglang_engines_with_other_ranks_are_held_against_the_trainer_only() -> None:
    sender, one, two = Sender(), sglang("http://s1"), sglang("http://s2", tp_size=2)
    two.checksums = {"w@0": "3", "w@1": "4"}
    transport = BroadcastTransport(sender)
    engines = await connected(transport, one, two)
    for engine in engines:
        await engine.begin_weight_update("u", MANIFEST)
        await engine.load_bucket(bucket(0, last=True))
    sender.table = ChecksumTable(ranks=({"w": "3"}, {"w": "5"}))
    await engines[1].begin_weight_update("u2", MANIFEST)
    with pytest.raises(WeightUpdateError, match="checksum is 4, that of what the trainer sent is 5") as caught:
        await engines[1].load_bucket(msgspec.structs.replace(bucket(0, last=True), update_id="u2"))
    assert (caught.value.engine, caught.value.tensor) == ("http://s2", "w@1")


async def test_without_verification_sglang_is_asked_for_no_checksums() -> None:
    sender, client = Sender(), sglang()
    sender.table = ChecksumTable(ranks=({"w": "another"},))
    (engine,) = await connected(BroadcastTransport(sender, verify=False), client)
    client.checksums = {}
    await engine.begin_weight_update("u", MANIFEST)
    await engine.load_bucket(bucket(0, last=True))
    await engine.commit_weight_update("u")
    assert await engine.weight_version() == 7
    assert engine.check is None
