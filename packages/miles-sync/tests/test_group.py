"""Groups are the ones that torch.distributed's own helper makes, and giving one up costs no time."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from sync_processes import FORK
from torch.distributed import distributed_c10d as c10d

from miles_contracts import DeadlineExceededError, InvalidFieldError
from miles_sync.group import Meeting


def join_as_sglang_does(port: int, name: str, queue: object) -> None:
    """Rank 1 by `rendezvous` and `_new_process_group_helper`: the way of `/init_weights_update_group`."""
    store, rank, size = next(
        c10d.rendezvous(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=timedelta(seconds=30))
    )
    prefixed = dist.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=timedelta(seconds=30)
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    tensor = torch.zeros(5, dtype=torch.uint8)
    dist.broadcast(tensor, src=0, group=group)
    queue.put(tensor.tolist())  # type: ignore[attr-defined]


def test_a_rank_that_joins_by_torchs_own_helper_meets_ours() -> None:
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=30)
    queue = FORK.Queue()
    process = FORK.Process(target=join_as_sglang_does, args=(meeting.port, "weights-x", queue), daemon=True)
    process.start()
    group = meeting.open("weights-x", 0, 2)
    group.broadcast(torch.arange(5, dtype=torch.uint8), 0)()
    assert queue.get(timeout=30) == [0, 1, 2, 3, 4]
    group.close()
    process.join(10)


def stay_away(port: int) -> None:
    """A rank that joins and never enters a collective."""
    group = Meeting("127.0.0.1", port, owner=False, timeout_s=60).open("g", 1, 2)
    threading.Event().wait()
    group.close()


def test_a_group_is_given_up_at_once_although_its_collective_hangs() -> None:
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=600)
    process = FORK.Process(target=stay_away, args=(meeting.port,), daemon=True)
    process.start()
    group = meeting.open("g", 0, 2)
    failed: list[RuntimeError] = []

    def send() -> None:
        try:
            # Larger than what the sockets take without a reader.
            group.broadcast(torch.zeros(1 << 26, dtype=torch.uint8), 0)()
        except RuntimeError as error:
            failed.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(1.0)
    assert sending.is_alive()
    group.close()  # would wait for ten minutes
    os.kill(process.pid, 9)  # type: ignore[arg-type]
    sending.join(60)
    assert failed
    process.join()


def test_a_group_whose_ranks_do_not_come_is_a_named_deadline_and_holds_up_no_other() -> None:
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=2)

    def wait_alone() -> None:
        with pytest.raises(DeadlineExceededError, match="group lonely"):
            meeting.open("lonely", 0, 2)

    waiting = threading.Thread(target=wait_alone)
    waiting.start()
    with pytest.raises(DeadlineExceededError, match="all 2 ranks of group other"):
        meeting.open("other", 0, 2)
    waiting.join()


def test_unknown_backends_are_refused() -> None:
    meeting = Meeting("127.0.0.1", 0, owner=True, timeout_s=5)
    with pytest.raises(InvalidFieldError, match="gloo or nccl"):
        meeting.open("g", 0, 2, "pigeon")
