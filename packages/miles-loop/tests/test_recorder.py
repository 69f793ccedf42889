"""Records are written in their order, and the groups among them beside the event loop."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loop_toy.groups import group
from loop_toy.recipe import RECIPE

from miles_contracts import Group, wire
from miles_loop import report, run_folder
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.config import RecordConfig
from miles_loop.display import PlainDisplay
from miles_loop.errors import DiskFullError
from miles_loop.progress import Progress
from miles_loop.recorder import RunRecorder
from miles_loop.run_folder import RunFolder, read_jsonl


class Run:
    """A run's folder with its recorder."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.create(config_for(RECIPE, parse([], TRAIN_FLAGS)))
        self.failures: Counter[str] = Counter()
        self.progress = Progress(steps=9)
        self.shown = io.StringIO()
        self.open()

    def open(self) -> None:
        self.recorder = RunRecorder(
            self.folder,
            RecordConfig(trajectories=2),
            self.progress,
            PlainDisplay(self.shown),
            tokens_sampled=lambda: 0,
            engine_restarts=lambda: 0,
            failures=lambda: self.failures,
            process_age_s=lambda: 1.0,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def groups(step: int) -> list[Group]:
    return [group(3 * step + i, (2, 3))[0] for i in range(3)]


async def test_the_event_loop_turns_while_groups_are_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, turned = threading.Event(), threading.Event()
    written: list[int] = []
    write = run_folder.write_atomic

    def slow(path: Path, data: bytes, **options: Any) -> None:
        if path.suffix == ".mls":
            written.append(threading.get_ident())
            begun.set()
            assert turned.wait(30), "the event loop stands still"
        write(path, data, **options)

    async def turn() -> None:
        await asyncio.to_thread(begun.wait)
        turned.set()

    monkeypatch.setattr(run_folder, "write_atomic", slow)
    await asyncio.gather(run.recorder.step(1, {}, groups(1)), turn())
    assert written != [threading.get_ident()]
    kept = wire.decode((run.folder.trajectories / "step_000001.mls").read_bytes(), list[Group])
    assert [g.prompt_index for g in kept] == [3, 4]


async def test_a_step_is_said_to_be_done_when_its_groups_are_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        await run.recorder.step(step, {"rollout/reward": step / 4}, groups(step))
        assert json.loads(run.folder.status_file.read_text())["step"] == step
        assert (run.folder.trajectories / f"step_00000{step}.mls").exists()
    assert [r["step"] for r in read_jsonl(run.folder.metrics_file)] == [1, 2, 3]
    assert [r["step"] for r in read_jsonl(run.folder.ledger_file)] == [1, 2, 3]

    def full(*_: Any, **__: Any) -> None:
        raise DiskFullError(run.folder.trajectories) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_atomic", full)
    with pytest.raises(DiskFullError):
        await run.recorder.step(4, {}, groups(4))
    assert run.progress.step == 3


async def test_a_step_that_is_given_up_ends_only_when_its_file_is_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    write = run_folder.write_atomic

    def slow(path: Path, data: bytes, **options: Any) -> None:
        begun.set()
        assert go.wait(30)
        write(path, data, **options)

    monkeypatch.setattr(run_folder, "write_atomic", slow)
    step = asyncio.create_task(run.recorder.step(1, {}, groups(1)))
    await asyncio.to_thread(begun.wait)
    step.cancel()
    await asyncio.sleep(0)
    assert not step.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert (run.folder.trajectories / "step_000001.mls").exists()


async def test_failed_groups_are_counted_by_reason_over_the_whole_run(run: Run) -> None:
    run.failures["reward raised ValueError: no (/my/r.py:3)"] = 4
    run.failures["the episode took longer than 5 s"] = 1
    await run.recorder.step(1, {}, groups(1))
    run.failures["reward raised ValueError: no (/my/r.py:3)"] = 7
    run.recorder.waiting()
    run.recorder.close()
    # A process that continues the run counts from nothing again.
    run.failures = Counter({"reward raised ValueError: no (/my/r.py:3)": 2})
    run.open()
    await run.recorder.step(2, {}, groups(2))
    found = report.make_report(run.folder.path)
    assert found.failures == {"reward raised ValueError: no (/my/r.py:3)": 9, "the episode took longer than 5 s": 1}
    table = report.text(found)
    assert "9: reward raised ValueError: no (/my/r.py:3)\n" in table
    many = {f"kind {i}": 10 - i for i in range(5)}
    shown = [text for label, text in report.rows(_with(found, many)) if label == "groups failed"]
    assert shown == ["10: kind 0", "9: kind 1", "8: kind 2", "13 for 2 other reasons"]


def _with(found: report.Report, failures: dict[str, int]) -> report.Report:
    return msgspec.structs.replace(found, failures=failures)


def test_final_fates_stand_beside_attempts(run: Run) -> None:
    sides = {"trained": (8, 32, 10.0, 0.5), "dropped": (3, 12, 40.0, 0.1), "left_out": (1, 4, 50.0, 0.0)}
    record: dict[str, float] = {}
    for side, (count, answers, length, reward) in sides.items():
        record |= {f"rollout/bias/{side}_groups": count, f"rollout/bias/{side}_trajectories": answers}
        record |= {f"rollout/bias/{side}_length": length, f"rollout/bias/{side}_reward": reward}
    asyncio.run(run.recorder.step(1, record, groups(1)))
    table = dict(report.rows(report.make_report(run.folder.path)))
    assert table["answers dropped"] == "12, mean length 40.0, mean reward 0.100 (of every attempt at a prompt)"
    assert table["prompts left out"] == "1 of 9; answers: 4, mean length 50.0, mean reward 0.000"
