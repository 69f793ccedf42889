from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_contracts import InvalidFieldError, WeightUpdateError
from miles_sync import segments
from miles_sync.segments import SegmentPool, sweep


def files(folder: Path) -> list[str]:
    return sorted(p.suffix for p in folder.iterdir())


def test_a_segment_is_used_again_and_the_pool_removes_everything(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path)
    first = pool.take(5000)
    first.array[:4] = 7
    pool.give_back(first, reuse=True)
    again = pool.take(100)
    assert again is first
    assert pool.num_bytes == first.capacity
    assert files(tmp_path) == [".bucket", ".lock"]
    pool.close()
    pool.close()
    assert files(tmp_path) == []


def test_a_free_segment_that_is_too_small_makes_place_for_a_larger_one(tmp_path: Path) -> None:
    pool = SegmentPool(tmp_path)
    pool.give_back(pool.take(10), reuse=True)
    large = pool.take(100_000)
    assert pool.num_bytes == large.capacity
    pool.close()


def test_the_files_of_a_killed_owner_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    living = SegmentPool(tmp_path)
    living.take(10)
    code = (
        "import sys, pathlib, time\n"
        "from miles_sync.segments import SegmentPool\n"
        "pool = SegmentPool(pathlib.Path(sys.argv[1])); pool.take(10)\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert sweep(tmp_path) == []
        assert files(tmp_path) == [".bucket", ".bucket", ".lock", ".lock"]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    assert len(sweep(tmp_path)) == 2
    assert files(tmp_path) == [".bucket", ".lock"]
    living.close()


def test_an_owner_whose_new_lock_was_swept_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, raced = fcntl.flock, []

    def racing(descriptor: int, flags: int) -> None:
        if flags == fcntl.LOCK_EX and not raced:
            raced.append(True)
            assert len(sweep(tmp_path)) == 1
        real(descriptor, flags)

    monkeypatch.setattr(segments.fcntl, "flock", racing)
    pool = SegmentPool(tmp_path)
    assert files(tmp_path) == [".lock"]
    assert sweep(tmp_path) == []
    pool.close()


def test_a_full_mount_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    pool = SegmentPool(tmp_path)
    with pytest.raises(WeightUpdateError, match=r"no room for a bucket of \d+ bytes.*free or enlarge the mount"):
        pool.take(100)
    assert files(tmp_path) == [".lock"]
    pool.close()


def test_another_failure_of_the_mount_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    pool = SegmentPool(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        pool.take(100)
    pool.close()


def test_refuses_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="give an existing folder"):
        SegmentPool(tmp_path / "nowhere")
