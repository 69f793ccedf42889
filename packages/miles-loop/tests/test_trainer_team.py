"""Rank 0 and the others: how they meet, and what happens when one does not answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from loop_toy.groups import group

from miles_contracts import MilesError
from miles_loop import trainer_link as link
from miles_loop.errors import ProcessDiedError, RunError, TrainerFailedError
from miles_loop.tcp_link import connect
from miles_loop.trainer_client import LOST_GROUP, _error_of
from miles_loop.trainer_group import costs_the_trainer, rank_name
from miles_loop.trainer_server import Connection, serve
from miles_loop.trainer_team import Gathering, Team, TrainerMembership, share_request
from miles_trainer.errors import RankFailedError, RankGoneError, RankLateError
from miles_trainer.shares import Share

START = link.Start(model_path="m", config={}, seed=0)


class Rank:
    """Another rank, which does as it is told by the directory that it should save into."""

    version = 3

    def close(self) -> None:
        """Nothing is held."""

    def answer(self, request: link.Request) -> link.Reply:
        """Answer, or fail."""
        if isinstance(request, link.Save) and request.directory == "/bug":
            raise KeyError("oops")
        if isinstance(request, link.TrainShare):
            return link.ShareDone(
                version=self.version,
                turns=[link.turn_digests(t) for t in request.trajectories],
                routes=[link.row_digests_of(t) for t in request.trajectories],
            )
        return link.Done()


@pytest.fixture
def pair() -> Iterator[tuple[Team, list[socket.socket]]]:
    """A team of two others, started, and their ends of the connections."""
    ends = [socket.socketpair() for _ in range(2)]

    def work(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):  # a test that has hung up
            serve(Connection(sock), lambda _: Rank())

    threads = [threading.Thread(target=work, args=(theirs,)) for _, theirs in ends]
    for thread in threads:
        thread.start()
    team = Team([ours for ours, _ in ends], 2)
    team.tell([START] * 2)
    assert [started.version for started in team.answers(link.Started)] == [3, 3]
    yield team, [theirs for _, theirs in ends]
    team.close()
    for thread in threads:
        thread.join()


def test_every_rank_gets_its_own_share(pair: tuple[Team, list[socket.socket]]) -> None:
    made, _ = group(0, (3, 0))
    trajectories = tuple(made)
    shares = [
        Share(
            trajectories=part, advantages=np.ones(len(part)), weights=np.ones(len(part)), num_trained=9, num_members=2
        )
        for part in (trajectories, ())
    ]
    pair[0].tell([share_request(share) for share in shares])
    first, second = pair[0].answers(link.ShareDone)
    assert first.turns == [link.turn_digests(t) for t in trajectories]
    assert second.turns == second.routes == []


def test_a_rank_that_fails_alone_ends_the_group(pair: tuple[Team, list[socket.socket]]) -> None:
    team, _ = pair
    team.tell([link.Save(directory="/ok"), link.Save(directory="/bug")])
    with pytest.raises(RankFailedError, match="trainer rank 2 answered KeyError: 'oops'"):
        team.answers(link.Done)
    with pytest.raises(RankFailedError, match="rank 2"):
        team.tell([link.Save(directory="/ok")] * 2)


def test_a_step_that_failed_on_all_ranks_leaves_the_group_whole(pair: tuple[Team, list[socket.socket]]) -> None:
    team, _ = pair
    team.tell([link.Save(directory="/bug")] * 2)
    assert [type(reply) for reply in team.replies()] == [link.Failed] * 2
    team.require_whole()
    team.tell([link.Save(directory="/ok")] * 2)
    assert len(team.answers(link.Done)) == 2


def test_a_rank_that_hung_up_is_named(pair: tuple[Team, list[socket.socket]]) -> None:
    team, theirs = pair
    theirs[1].shutdown(socket.SHUT_RDWR)
    named = team.give_up(RankLateError("somebody did not come"))
    assert isinstance(named, RankGoneError)
    assert "trainer rank 2 has ended: somebody did not come" in str(named)
    with pytest.raises(RankGoneError):
        team.require_whole()


def test_a_rank_without_an_answer_is_late() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        team = Team([ours], 0.2)
        team.tell([START])
        with pytest.raises(RankLateError, match=r"trainer rank 1 gave no answer within 0\.2 s"):
            team.answers(link.Started)
        assert isinstance(team.give_up(RankLateError("x")), RankLateError), "it has not hung up"
        team.close()


def test_only_who_knows_a_ranks_secret_takes_its_place() -> None:
    gathering = Gathering(link.OpenGroup(size=3, host="127.0.0.1", timeout_s=20))
    opened = gathering.opened()
    assert len(set(opened.secrets)) == 2
    with pytest.raises(RunError, match="is not this run's driver"):
        connect(opened.addresses[0], opened.secrets[1])
    with ThreadPoolExecutor() as pool:
        sockets = list(pool.map(connect, opened.addresses, opened.secrets))
    team = gathering.team()
    team.tell([link.Save(directory="1"), link.Save(directory="2")])
    assert [Connection(sock).receive() for sock in sockets] == [link.Save(directory="1"), link.Save(directory="2")]
    team.close()
    for sock in sockets:
        sock.close()


def test_ranks_that_do_not_come_are_late() -> None:
    gathering = Gathering(link.OpenGroup(size=2, host="127.0.0.1", timeout_s=0.2))
    with pytest.raises(RankLateError, match=r"not all of 2 trainer ranks came within 0\.2 s"):
        gathering.team()


def test_a_process_that_is_told_nothing_is_a_group_of_its_own() -> None:
    membership = TrainerMembership()
    ranks, team = membership.meet(START)
    assert (ranks.rank, ranks.size, team) == (0, 1, None)
    assert membership.next_driver() is None
    with pytest.raises(MilesError, match="Save before start"):
        membership.before(link.Save(directory="x"))


@pytest.mark.parametrize("kind", ["RankGoneError", "RankLateError", "RanksDivergedError"])
def test_what_costs_the_whole_group(kind: str) -> None:
    error = _error_of(link.Failed(kind=kind, message="m"))
    assert isinstance(error, TrainerFailedError)
    assert error.reason in LOST_GROUP
    assert costs_the_trainer(error)
    assert not costs_the_trainer(TrainerFailedError("non_finite", "m"))
    assert not costs_the_trainer(RunError("rank_gone", "of something else"))


@pytest.mark.parametrize(("name", "costs"), [("trainer", True), ("trainer-3", True), ("engine-0", False)])
def test_whose_end_costs_the_trainer(name: str, costs: bool) -> None:
    assert costs_the_trainer(ProcessDiedError(name, "ended", Path("x.log"), "")) is costs
    assert (rank_name(0), rank_name(3)) == ("trainer", "trainer-3")
