"""Segments opened by name: the file stays ours, torch's manager keeps nothing of ours, and what fails has a reason."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_contracts import WeightUpdateError
from miles_sync import named_memory
from miles_sync.handles import pack
from miles_sync.named_memory import HEADER_BYTES, NamedMemory
from miles_sync.segments import SegmentPool

SHM = Path("/dev/shm")


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    made = SegmentPool(SHM)
    yield made
    made.close()


def test_a_torch_that_lays_shared_memory_out_otherwise_is_found_out(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, named = pool.take(4096), NamedMemory()
    monkeypatch.setattr(named_memory, "HEADER_BYTES", 2 * HEADER_BYTES)
    with pytest.raises(WeightUpdateError, match="has no header of 128 bytes"):
        named.over(segment)
    monkeypatch.undo()
    segment.array[:] = 7
    memory = named.over(segment)
    assert bool((memory == 7).all())  # opening it is no writing
    assert len(memory) == segment.capacity - HEADER_BYTES
    other = pool.take(4096)
    other.path.unlink()
    with pytest.raises(WeightUpdateError, match="cannot open shared memory by name: .*No such file"):
        named.over(other)
    named.close()


def test_a_segment_may_be_passed_on_and_never_closed_as_often_as_one_likes(pool: SegmentPool) -> None:
    segment, named = pool.take(4096), NamedMemory()
    for _ in range(3):
        segment.array[:4] = 0  # as if everybody had been counted out
        memory = named.over(segment)
        pack(memory, ())
    del memory
    named.close()
    assert segment.path.exists()


def test_torchs_manager_keeps_nothing_of_this_process_open(pool: SegmentPool) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # as the end that a parent listens to
    named = NamedMemory()
    named.over(pool.take(4096))
    assert named._manager is not None
    manager = named._manager.pid
    kept = {os.readlink(link) for link in Path(f"/proc/{manager}/fd").iterdir()}
    assert "/dev/null" in kept
    assert os.readlink(f"/proc/self/fd/{writing}") not in kept
    assert os.getsid(manager) != os.getsid(0)  # what ends our group does not end it
    os.close(reading)
    os.close(writing)
    named.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo 'ERROR: Invalid argument'; exit 1", r"gives no socket .Invalid argument.; point TMPDIR"),
        ("exit 3", r"gives no socket .status 3."),
        (None, "cannot be started: No such file"),
    ],
)
def test_a_manager_that_does_not_start_is_named(
    pool: SegmentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, message: str
) -> None:
    manager = tmp_path / "manager"
    if program is not None:
        manager.write_text(f"#!/bin/sh\n{program}\n")
        manager.chmod(0o755)
    monkeypatch.setattr(named_memory, "_MANAGER", manager)
    with pytest.raises(WeightUpdateError, match=message):
        NamedMemory().over(pool.take(4096))


def test_a_folder_for_temporary_files_may_be_too_deep_for_a_socket(
    pool: SegmentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    named = NamedMemory()
    assert len(named.over(pool.take(4096))) > 0
    assert not list(deep.iterdir())
    named.close()


MANAGER_DIES = """
import os, signal
from pathlib import Path
from miles_contracts import WeightUpdateError
from miles_sync.named_memory import NamedMemory
from miles_sync.segments import SegmentPool
pool, named = SegmentPool(Path("/dev/shm")), NamedMemory()
segment = pool.take(4096)
named.over(segment)
os.kill(named._manager.pid, signal.SIGKILL)
named._manager.wait()
try:
    named.over(segment)
except WeightUpdateError as error:
    os.write(1, error.reason.encode())
pool.close()
os._exit(0)
"""


def test_a_manager_that_has_died_is_named_before_a_handle_is_made() -> None:
    """In a process of its own, which cannot close what it has open any more."""
    said = subprocess.run([sys.executable, "-c", MANAGER_DIES], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said == "torch_shm_manager ended with -9; restart the trainer"
