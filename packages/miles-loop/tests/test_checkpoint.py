"""A checkpoint is complete or it is not there."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_toy.groups import group

from miles_contracts import InvalidFieldError
from miles_loop.checkpoint import (
    LoopState,
    checkpoint_name,
    clean,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from miles_loop.errors import DiskFullError, RunError
from miles_rollout.buffer import Entry
from miles_rollout.ledger import Issue
from miles_rollout.worker import WorkerState


def state(step: int) -> LoopState:
    """What a driver remembers after a step."""
    made, answers = group(step, (2, 3))
    entry = Entry(group=made, generation_s=0.5, put_at=1.0, order=0)
    rollout = WorkerState(
        source={"next": step + 2}, again=(Issue(prompt_index=step + 1, attempt=1),), kept=(), entries=(entry,)
    )
    records = {a.request_id or "": [a.output_ids, a.logprobs, 0] for a in answers}
    return LoopState(step=step, rollout=rollout, records=records, counters={"tokens_trained": 7.0})


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(p.name for p in folder.iterdir())


async def save_trainer(directory: Path) -> None:
    """The trainer's part."""
    (directory / "hf").mkdir()
    (directory / "hf" / "model.safetensors").write_bytes(os.urandom(64))
    (directory / "empty").write_bytes(b"")


async def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = await write_checkpoint(tmp_path, state(4), save_trainer, keep=2)
    assert path.name == checkpoint_name(4) == "step_000004"
    read = read_checkpoint(path)
    assert read.step == 4
    assert read.rollout.again == (Issue(prompt_index=5, attempt=1),)
    assert read.rollout.entries[0].group.prompt_index == 4
    assert read.counters == {"tokens_trained": 7.0}
    assert list(read.records["p4-m0"][0]) == list(state(4).records["p4-m0"][0])


async def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (2, 4, 10, 1_000_000):
        await write_checkpoint(tmp_path, state(step), save_trainer, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 1_000_000]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert read_checkpoint(newest).step == 1_000_000


async def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    await write_checkpoint(tmp_path, state(4), save_trainer, keep=2)
    path = await write_checkpoint(tmp_path, state(4), save_trainer, keep=2)
    assert read_checkpoint(path).step == 4
    assert names(tmp_path) == ["step_000004"]


async def test_a_trainer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    await write_checkpoint(tmp_path, state(2), save_trainer, keep=2)

    async def fails(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(DiskFullError):
        await write_checkpoint(tmp_path, state(4), fails, keep=1)
    assert names(tmp_path) == ["step_000002"]


async def test_leftovers_of_a_killed_run_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_000006").mkdir()
    (tmp_path / ".trash-step_000002-77").mkdir()
    (tmp_path / "step_000008").mkdir()  # without its seal
    assert newest_checkpoint(tmp_path) is None
    clean(tmp_path)
    assert names(tmp_path) == ["step_000008"]


@settings(max_examples=25, deadline=None)
@given(where=st.integers(0, 10**9), mask=st.integers(1, 255))
def test_every_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, where: int, mask: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    path = asyncio.run(write_checkpoint(folder, state(3), save_trainer, keep=1))
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and p.stat().st_size and p.name != "checkpoint.json"]
    file = files[where % len(files)]
    data = bytearray(file.read_bytes())
    data[where % len(data)] ^= mask
    file.write_bytes(data)
    with pytest.raises(RunError, match=f"{file.name} is not what was written"):
        read_checkpoint(path)


async def test_a_missing_file_is_found(tmp_path: Path) -> None:
    path = await write_checkpoint(tmp_path, state(3), save_trainer, keep=1)
    (path / "empty").unlink()
    with pytest.raises(RunError, match="empty is not what was written"):
        read_checkpoint(path)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="not a checkpoint"):
        read_checkpoint(tmp_path)
