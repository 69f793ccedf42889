"""Files of a run are whole or absent, whatever ends the writer."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_toy.groups import group
from loop_toy.recipe import RECIPE, main

from miles_contracts import Group, InvalidFieldError, wire
from miles_loop import cli
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.errors import DiskFullError
from miles_loop.export import export_model
from miles_loop.files import is_disk_full, remove_tree, write_atomic
from miles_loop.run_folder import JsonlWriter, RunFolder, TrajectoryRecorder, read_jsonl, truncate_jsonl

CONFIG = config_for(RECIPE, parse(["--trainer.optimizer.max_grad_norm", "none"], TRAIN_FLAGS))


def full(*_: Any, **__: Any) -> Any:
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_folder_stores_the_configuration(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run")
    folder.create(CONFIG)
    assert folder.read_config() == CONFIG
    run = json.loads((folder.path / "run.json").read_text())
    assert run["recipe"] == "toy"
    assert run["packages"]["miles-loop"]
    folder.prepare(CONFIG)
    folder.unlock()
    assert len(json.loads((folder.path / "run.json").read_text())["starts"]) == 2


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(CONFIG)
    with pytest.raises(InvalidFieldError, match="a run is there"):
        folder.create(CONFIG)


def test_a_folder_that_nobody_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / ".lock"))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidFieldError, match="run_dir: got .*; cannot be written: Read-only file system"):
        RunFolder(tmp_path).lock()


def test_an_error_of_the_system_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/where")

    monkeypatch.setattr("miles_loop.export.export_model", denied)
    assert main(["export", "runs/x", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "miles-toy: /some/where: Permission denied\n"
    monkeypatch.setattr("miles_loop.report.make_report", denied)
    assert cli.main(["report", "runs/x"]) == 1
    assert capsys.readouterr().err == "miles: /some/where: Permission denied\n"


def test_an_export_where_nothing_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(CONFIG)
    folder.unlock()
    monkeypatch.setattr("miles_loop.export.list_checkpoints", lambda path: [(3, tmp_path)])
    monkeypatch.setattr("miles_loop.export.read_checkpoint", lambda path: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidFieldError, match="FOLDER: got .*; cannot be made: Not a directory"):
        export_model(folder.path, tmp_path / "file" / "model")


def test_a_folder_whose_run_failed_before_its_first_step_is_used_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(CONFIG)
    folder.model.mkdir()
    folder.metrics_file.write_text('{"step":0}\n')
    folder.write_status({"status": "failed"})
    (folder.logs / "driver.log").write_text("why")
    folder.unlock()
    folder.create(CONFIG)
    assert not folder.model.exists()
    assert not folder.metrics_file.exists()
    assert not folder.status_file.exists()
    assert (folder.logs / "driver.log").read_text() == "why"


@pytest.mark.parametrize("what", ["running", "step", "checkpoint"])
def test_a_folder_with_something_to_continue_is_not(tmp_path: Path, what: str) -> None:
    folder = RunFolder(tmp_path)
    folder.create(CONFIG)
    folder.write_status({"status": "running" if what == "running" else "failed"})
    if what == "step":
        folder.metrics_file.write_text('{"step":1}\n')
    if what == "checkpoint":
        (folder.checkpoints / "step_000001").mkdir()
    folder.unlock()
    with pytest.raises(InvalidFieldError, match="a run is there"):
        folder.create(CONFIG)


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(InvalidFieldError, match="the folder is not empty"):
        RunFolder(tmp_path).create(CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_has_no_end_is_not_read() -> None:
    assert list(read_jsonl(Path("/dev/full"))) == []
    assert list(read_jsonl(Path("/nowhere"))) == []


def test_a_device_that_is_full_is_named() -> None:
    writer = JsonlWriter(Path("/dev/full"))
    with pytest.raises(DiskFullError):
        writer.write({"step": 1})
    writer.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidFieldError, match="cannot be made"):
        RunFolder(tmp_path / "file" / "run").create(CONFIG)


def test_no_run_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="no run there"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.toml").write_text("steps =")
    with pytest.raises(InvalidFieldError, match="damaged"):
        RunFolder(tmp_path).read_config()


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert not second.in_use
    first.lock()
    assert second.in_use
    with pytest.raises(InvalidFieldError, match="another process runs in this folder"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_status_is_empty_until_it_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_status() == {}
    folder.write_status({"step": 3})
    assert folder.read_status() == {"step": 3}


@given(st.integers(0, 5), st.integers(0, 60))
def test_reading_and_truncating_survive_a_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, keep: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "m.jsonl"
    writer = JsonlWriter(path)
    for step in range(5):
        writer.write({"step": step, "x": "y" * step})
    writer.close()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    whole = list(read_jsonl(path))
    assert [r["step"] for r in whole] == list(range(len(whole)))
    truncate_jsonl(path, keep)
    assert list(read_jsonl(path)) == whole[: keep + 1]
    assert path.read_bytes() == b"" or path.read_bytes().endswith(b"\n")
    writer = JsonlWriter(path)
    writer.write({"step": 9})
    writer.close()
    assert list(read_jsonl(path)) == [*whole[: keep + 1], {"step": 9}]


def test_a_record_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1})
    raw = writer._file

    class Nearly:
        """Takes a part, then is full."""

        def tell(self) -> int:
            return raw.tell()

        def write(self, data: bytes) -> int:
            if len(data) < 5:
                full()
            return raw.write(data[: len(data) - 4])

        def truncate(self, size: int) -> None:
            raw.truncate(size)

    writer._file = Nearly()  # type: ignore[assignment]
    with pytest.raises(DiskFullError, match=r"no space left on the disk of .*m\.jsonl"):
        writer.write({"step": 2})
    assert list(read_jsonl(tmp_path / "m.jsonl")) == [{"step": 1}]


def test_an_atomic_write_keeps_the_old_content_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        write_atomic(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        ("SafetensorError: I/O error: No space left on device (os error 28)", True),
        ("something else", False),
    ],
)
def test_a_full_disk_is_recognised(error: OSError | str, expected: bool) -> None:
    assert is_disk_full(error) is expected


def test_a_tree_is_removed_and_a_missing_one_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_trajectories_are_recorded_within_a_budget(tmp_path: Path) -> None:
    groups = [group(index, (3, 4))[0] for index in range(3)]
    size = len(wire.encode(groups[:2]))
    recorder = TrajectoryRecorder(tmp_path, 2, 2 * size)
    for step in range(1, 5):
        recorder.write(step, groups)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001.mls", "step_000002.mls"]
    read = wire.decode((tmp_path / "step_000001.mls").read_bytes(), list[Group])
    assert [g.prompt_index for g in read] == [0, 1]
    TrajectoryRecorder(tmp_path, 2, 2 * size).write(9, groups)
    assert len(list(tmp_path.iterdir())) == 2
    TrajectoryRecorder(tmp_path, 0, 2 * size).write(9, groups)
