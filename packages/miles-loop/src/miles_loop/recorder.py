"""Writes down what a run does: metrics, trained prompts, sampled groups and the status, in the order it happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_contracts import Group
from miles_loop.config import RecordConfig
from miles_loop.display import Display
from miles_loop.files import in_thread
from miles_loop.progress import FAILURE, Progress
from miles_loop.records import ledger_entry, session_counts
from miles_loop.run_folder import JsonlWriter, RunFolder, TrajectoryRecorder
from miles_rollout.evaluation import EvalPoint


class RunRecorder:
    """The record files of a run, and its progress.

    Args:
        folder: where they are.
        config: how many trajectories are kept.
        progress: is told of every record.
        display: is shown it.
        tokens_sampled, engine_restarts: counts since this process started.
        failures: failed groups since this process started, by reason.
        process_age_s: seconds since it started.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RecordConfig,
        progress: Progress,
        display: Display,
        *,
        tokens_sampled: Callable[[], int],
        engine_restarts: Callable[[], int],
        failures: Callable[[], Mapping[str, int]],
        process_age_s: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._display = display
        self._tokens_sampled = tokens_sampled
        self._engine_restarts = engine_restarts
        self._failures = failures
        self._process_age_s = process_age_s
        self._metrics = JsonlWriter(folder.metrics_file)
        self._ledger = JsonlWriter(folder.ledger_file)
        self._trajectories = TrajectoryRecorder(
            folder.trajectories, config.trajectories, config.trajectories_mib * 2**20
        )
        self._before = dict(progress.counters)
        self._skipped_reason: str | None = None

    async def step(self, step: int, record: dict[str, float], groups: Sequence[Group]) -> None:
        """Record a step and the groups it trained; step 0 is what was measured before the first.

        Groups are encoded and written beside the event loop, which serves the answers that are under way meanwhile.

        Raises:
            DiskFullError: no room.
        """
        progress = self._progress
        line: dict[str, Any] = {"step": step, "time": time.time(), **{key: record[key] for key in sorted(record)}}
        if self._skipped_reason is not None:
            line["eval/skipped_reason"], self._skipped_reason = self._skipped_reason, None
        self._metrics.write(line)
        if step > 0:
            self._ledger.write(ledger_entry(step, groups))
            await in_thread(self._trajectories.write, step, list(groups))
            progress.step = step
        if step == 1:
            progress.time_to_first_step_s = self._process_age_s()
        progress.note(line)
        self._count(record)
        self._folder.write_status(progress.to_status())
        self._display.step(progress)

    def point(self, point: EvalPoint) -> None:
        """Record an evaluation of an earlier version as a line of its own, under the step that made the version.

        Raises:
            DiskFullError: no room.
        """
        self._note_skipped(point)
        line: dict[str, Any] = {"step": point.version, "time": time.time()}
        line |= {key: point.metrics[key] for key in sorted(point.metrics)}
        self._metrics.write(line if point.skipped is None else line | {"eval/skipped_reason": point.skipped})
        self._progress.note(line)
        self._folder.write_status(self._progress.to_status())
        for name, value in line.items():
            if name.endswith("/reward"):
                self._display.note(f"version {point.version}: {name} {value:.3f}")

    def waiting(self) -> None:
        """Refresh the status while a step takes its time: what is counted, and when it was last looked at.

        Raises:
            DiskFullError: no room.
        """
        self._count_running()
        self._folder.write_status(self._progress.to_status())

    def part_of_step(self, point: EvalPoint) -> dict[str, float]:
        """Figures of an evaluation for the record of the step that comes next; why it was skipped goes there, too."""
        self._note_skipped(point)
        self._skipped_reason = point.skipped
        return dict(point.metrics)

    def _note_skipped(self, point: EvalPoint) -> None:
        if point.skipped is not None:
            self._progress.counters["evaluations_skipped"] += 1
            self._display.note(f"the evaluation of version {point.version} is skipped: {point.skipped}")

    def sync(self) -> None:
        """Make all records survive a power cut."""
        self._metrics.sync()
        self._ledger.sync()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._ledger.close()

    def _count_running(self) -> None:
        counters, before = self._progress.counters, self._before
        counters["tokens_sampled"] = before["tokens_sampled"] + self._tokens_sampled()
        counters["engine_restarts"] = before["engine_restarts"] + self._engine_restarts()
        counters["wall_s"] = before["wall_s"] + self._process_age_s()
        for reason, count in self._failures().items():
            counters[FAILURE + reason] = before.get(FAILURE + reason, 0.0) + count

    def _count(self, record: dict[str, float]) -> None:
        self._count_running()
        counters = self._progress.counters
        counters["prompts_given_up"] += record.get("rollout/fully_async/given_up_prompts", 0.0)
        counters["rollout_worker_restarts"] += record.get("router/rollout_worker_restarts", 0.0)
        counters["prompts_dropped"] += record.get("rollout/fully_async/dropped_prompts", 0.0)
        for key, value in session_counts(record).items():
            counters[key] = counters.get(key, 0.0) + value
