"""What people and scripts are shown of a run: records, display, report, plot, umbrella command."""

from __future__ import annotations

import io
import json
import math
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_toy.groups import group
from loop_toy.recipe import RECIPE

from miles_contracts import InvalidFieldError, Status
from miles_loop import cli, doctor, report
from miles_loop.arguments import config_for, parse
from miles_loop.command import TRAIN_FLAGS
from miles_loop.compose import ArrivedRewards
from miles_loop.display import LiveDisplay, PlainDisplay, bar, duration, make_display, sparkline, step_line
from miles_loop.plot import plot_rewards
from miles_loop.progress import Progress, RunStatus
from miles_loop.records import ledger_entry, rollout_record, split_clock
from miles_loop.run_folder import JsonlWriter, RunFolder
from miles_rollout.filters import reward_variance

CONFIG = config_for(RECIPE, parse([], TRAIN_FLAGS))
RECORDS: list[dict[str, Any]] = [
    {"step": 0, "time": 1.0, "eval/a/reward": 0.1, "eval/b/reward": 0.3},
    {"step": 1, "time": 2.0, "rollout/reward": 0.25, "train/loss": 0.5},
    {"step": 2, "time": 3.0, "rollout/reward": 0.75, "eval/a/reward": 0.9, "eval/b/reward": 0.7},
]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run of two steps."""
    folder = RunFolder(tmp_path / "run")
    folder.create(CONFIG)
    writer = JsonlWriter(folder.metrics_file)
    for record in RECORDS:
        writer.write(record)
    writer.close()
    progress = Progress(steps=2, step=2, status=RunStatus.FINISHED, time_to_first_step_s=4.5)
    progress.counters |= {"tokens_sampled": 120.0, "tokens_trained": 100.0, "wall_s": 61.0}
    folder.write_status(progress.to_status())
    folder.unlock()
    return folder


# -- records ----------------------------------------------------------------------------------------------


def test_the_batch_in_figures() -> None:
    groups = [group(0, (2, 4))[0], group(1, (0, 6))[0]]
    cut = groups[0].trajectories[1].replace(status=Status.TRUNCATED, metrics={"calls": 3.0})
    groups[0] = type(groups[0])(prompt_index=0, size=2, trajectories=(groups[0].trajectories[0], cut))
    record = rollout_record(groups, 0.9)
    assert record["rollout/response_length/mean"] == 3
    assert (record["rollout/response_length/min"], record["rollout/response_length/max"]) == (0, 6)
    assert record["rollout/prompt_length/mean"] == 3
    assert record["rollout/truncated_ratio"] == 0.25
    assert record["rollout/reward"] == 0.9
    assert record["rollout/reward_trained"] == 0.5
    assert record["rollout/reward_std"] == 0.5
    assert record["rollout/metrics/calls"] == 3
    assert rollout_record(groups, None)["rollout/reward"] == 0.5
    assert ledger_entry(7, groups) == {"step": 7, "prompts": [[0, 0], [1, 0]]}


def test_what_depends_on_the_clock_is_under_perf() -> None:
    split = split_clock(
        {
            "rollout/fully_async/trainer_wait_seconds": 1.0,
            "rollout/metrics/episode_seconds": 2.0,
            "rollout/fully_async/queue_size": 3.0,
        }
    )
    assert split == {
        "perf/rollout_trainer_wait_s": 1.0,
        "perf/rollout_metrics_episode_s": 2.0,
        "rollout/fully_async/queue_size": 3.0,
    }


def test_the_reward_curve_counts_dropped_groups_too() -> None:
    arrived = ArrivedRewards(reward_variance())
    kept, _ = group(0, (1, 1))
    solved = type(kept)(prompt_index=1, size=2, trajectories=tuple(t.replace(reward=1.0) for t in group(1, (1, 1))[0]))
    assert arrived(kept).keep
    assert not arrived(solved).keep
    assert arrived.take() == 0.75
    assert arrived.take() is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.randoms())
def test_the_reward_does_not_depend_on_the_order_of_arrival(rewards: list[float], random: Any) -> None:
    shuffled = list(rewards)
    random.shuffle(shuffled)
    values = []
    for order in (rewards, shuffled):
        arrived = ArrivedRewards(None)
        for reward in order:
            one, _ = group(0, (1,))
            arrived(type(one)(prompt_index=0, size=1, trajectories=(one.trajectories[0].replace(reward=reward),)))
        values.append(arrived.take())
    assert values[0] == values[1]


# -- display ----------------------------------------------------------------------------------------------


def progress_with(records: list[dict[str, Any]]) -> Progress:
    """As the driver keeps it."""
    progress = Progress(steps=4)
    progress.begin(0)
    for record in records:
        progress.step = record["step"]
        progress.note(record)
    return progress


def test_without_a_terminal_there_are_plain_lines() -> None:
    stream = io.StringIO()
    display = make_display(plain=False, stream=stream)
    assert isinstance(display, PlainDisplay)
    progress = Progress(steps=2)
    with display:
        for phase in ("starting", "starting", "loading"):
            progress.phase = phase
            display.phase(progress)
        progress = progress_with(RECORDS[:2])
        display.step(progress)
        display.note("something happened")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["starting ...", "loading ..."]
    assert lines[2].startswith("step 1/4  reward 0.250  loss 0.5000")
    assert lines[3] == "something happened"


def test_a_step_in_one_line() -> None:
    line = step_line(progress_with(RECORDS))
    assert "reward 0.750" in line
    assert "eval/a/reward 0.900" in line
    assert line.endswith("left")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_panel() -> None:
    stream = Terminal()
    display = make_display(plain=False, stream=stream)
    assert isinstance(display, LiveDisplay)
    with display:
        display.note("run folder: x")
        progress = progress_with(RECORDS)
        progress.counters["token_mismatches"] = 2
        display.phase(progress)
        display.step(progress)
    shown = stream.getvalue()
    for expected in ("run folder: x", "step", "2/4", "reward", "held out", "0.200 -> 0.800", "token mismatches"):
        assert expected in shown
    assert isinstance(make_display(plain=True, stream=stream), PlainDisplay)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, "?"), (7.44, "7.4 s"), (125.2, "2 min 05 s"), (11400, "3 h 10 min")]
)
def test_durations(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


def test_bars_and_sparklines() -> None:
    assert bar(0.5, 4) == "██░░"
    assert bar(7, 4) == "████"
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([5, 5]) == "▁▁"
    assert len(sparkline([float(i) for i in range(100)], 10)) == 10


# -- report -----------------------------------------------------------------------------------------------


def test_a_finished_run(run: RunFolder) -> None:
    found = report.make_report(run.path)
    assert (found.status, found.steps, found.steps_planned) == ("finished", 2, 2)
    assert (found.eval_first, found.eval_last) == (pytest.approx(0.2), pytest.approx(0.8))
    assert (found.reward_first, found.reward_last) == (0.25, 0.75)
    assert (found.tokens_sampled, found.tokens_trained, found.token_mismatches) == (120, 100, 0)
    assert (found.time_to_first_step_s, found.wall_s) == (4.5, 61.0)
    assert found.evaluations[1] == {"step": 2, "a": 0.9, "b": 0.7}
    assert "0.200 -> 0.800 (+0.600)" in report.text(found)
    assert "1 min 01 s" in report.text(found)


def test_a_run_whose_driver_is_gone_has_died(run: RunFolder) -> None:
    run.write_status(Progress(steps=2, status=RunStatus.RUNNING).to_status())
    found = report.make_report(run.path)
    assert (found.status, found.reason) == ("died", "driver_gone")
    assert "--resume" in report.text(found)
    owner = RunFolder(run.path)
    owner.lock()
    assert report.make_report(run.path).status == "running"
    owner.unlock()


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(CONFIG)
    folder.unlock()
    found = report.make_report(tmp_path)
    assert (found.steps, found.eval_first, found.status) == (0, None, "died")
    assert "-" in report.text(found)


def test_the_plot_is_a_picture(run: RunFolder) -> None:
    path = plot_rewards(run)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    run.metrics_file.write_text("")
    assert plot_rewards(run) is None


# -- umbrella ---------------------------------------------------------------------------------------------


def test_report_as_json_has_the_names_that_scripts_rely_on(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {
        *("steps", "status", "eval_first", "eval_last", "reward_first", "reward_last", "tokens_sampled"),
        *("tokens_trained", "token_mismatches", "time_to_first_step_s", "wall_s"),
    }
    assert cli.main(["report", str(run.path)]) == 0
    assert "held-out reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["reprot"], "did you mean 'report'?"),
        (["report"], "give a run folder, or several"),
        (["report", "nowhere"], "no run there"),
        (["report", "x", "--jsn"], "did you mean '--json'?"),
        (["recipes", "--json"], "miles recipes takes no options"),
        (["doctor", "x"], "miles doctor takes none"),
    ],
)
def test_bad_umbrella_commands(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "miles doctor" in capsys.readouterr().out
    for command in cli.PAGES:
        assert cli.main([command, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: miles {command}")


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Announce recipes."""
    found = [EntryPoint(name=name, value=value, group=cli.GROUP) for name, value in points.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: found)


def test_recipes_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, toy="loop_toy.recipe:RECIPE")
    assert cli.main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert "miles-toy: A toy for tests." in shown
    assert "vowels, sums" in shown


def test_recipes_that_cannot_be_loaded_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, gone="nowhere:RECIPE", wrong="json:dumps")
    assert cli.main(["recipes"]) == 1
    shown = capsys.readouterr().err
    assert "gone (nowhere:RECIPE)" in shown
    assert "wrong (json:dumps): not a Recipe" in shown
    assert doctor.check_recipes().verdict is doctor.Verdict.BAD
    install(monkeypatch)
    assert cli.main(["recipes"]) == 0
    assert doctor.check_recipes().verdict is doctor.Verdict.WARNING


# -- doctor -----------------------------------------------------------------------------------------------


def test_the_doctor_finds_this_machine_fit_or_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for finding in doctor.examine():
        assert finding.found
        assert finding.verdict is doctor.Verdict.GOOD or finding.remedy
    assert cli.main(["doctor", "--json"]) in (0, 1)
    assert {f["name"] for f in json.loads(capsys.readouterr().out)} >= {"python", "memory", "shared memory"}
    cli.main(["doctor"])
    assert "python" in capsys.readouterr().out


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert doctor.check_bytecode().verdict is doctor.Verdict.WARNING
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "missing: torch" in doctor.check_packages().found
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert doctor.check_cpus().verdict is doctor.Verdict.WARNING
    usage = doctor.shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert doctor.check_disk().verdict is doctor.Verdict.WARNING
    assert doctor.check_shared_memory().verdict is doctor.Verdict.WARNING


def test_progress_estimates_the_time_left() -> None:
    progress = Progress(steps=4)
    assert progress.seconds_left is None
    progress.begin(0)
    progress.step = 2
    assert progress.seconds_left is not None
    assert math.isfinite(progress.seconds_left)


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="no run there"):
        report.make_report(tmp_path)


def test_runs_side_by_side(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunFolder(tmp_path / "other")
    other.create(CONFIG)
    progress = Progress(steps=5, status=RunStatus.FAILED, reason="bug")
    progress.counters |= {"trainer_restarts": 2.0, "failure/no luck": 3.0, "failure/bad luck": 1.0}
    other.write_status(progress.to_status())
    other.unlock()
    assert cli.main(["report", str(run.path), str(other.path)]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    table = {cells[0]: cells[1:] for cells in ([c.strip() for c in line if c.strip()] for line in lines)}
    assert table["folder"] == [str(run.path), str(other.path)]
    assert table["status"] == ["finished", "failed: bug"]
    assert table["steps"] == ["2 of 2", "0 of 5"]
    assert table["held-out reward"] == ["0.200 -> 0.800 (+0.600)", "-"]
    assert table["trainer restarts"] == ["-", "2"], "only one of them has it"
    assert table["groups failed"] == ["-", "3: no luck; 1: bad luck"]
    assert cli.main(["report", str(run.path), str(other.path), "--json"]) == 0
    assert [r["status"] for r in json.loads(capsys.readouterr().out)] == ["finished", "failed"]
    assert cli.main(["report", str(run.path), "nowhere"]) == 2
    assert "RUN: got 'nowhere'; no run there" in capsys.readouterr().err
    assert cli.main(["report"]) == 2
    assert "give a run folder, or several to compare" in capsys.readouterr().err
