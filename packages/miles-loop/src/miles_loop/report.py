"""What a run has achieved, read from its folder; works while it runs, after it finished and after it died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError
from miles_loop.display import duration
from miles_loop.progress import FAILURE, RunStatus
from miles_loop.run_folder import RunFolder, read_jsonl
from miles_rollout.metrics import BIAS_PREFIX

_FAILURES_SHOWN = 3
"""Kinds of fault that the table names."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of the comparison that shows what kind of prompts a run leaves out.

    Attributes:
        groups: how many groups the answers are of, over all steps.
        answers: how many, over all steps.
        length: mean sampled tokens, None without answers.
        reward: mean reward of those that were scored (low: hard prompts), None without any.
    """

    groups: int
    answers: int
    length: float | None
    reward: float | None


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in the sessions of an agent's task, over all episodes that ended.

    Attributes:
        tokens_audited: tokens that may be trained, compared with the engine's record at the end of their episode.
        mismatches: those that differ from it; their episodes failed and were not trained.
        turns, trajectories: committed turns, and trajectories made of them.
        branches: trajectories beyond a session's first (edited or compacted histories).
        abandoned_turns, abandoned_tokens: turns that the agent asked for again, and their tokens; never trained.
        discarded_turns: answers that never became a turn, because the agent or the engine gave up.
        truncated_turns: turns cut by their length limit.
        malformed_calls: tool calls that could not be read and were delivered as text.
        repairs: kind of repair -> turns that stayed trainable thanks to it.
    """

    tokens_audited: int
    mismatches: int
    turns: int
    trajectories: int
    branches: int
    abandoned_turns: int
    abandoned_tokens: int
    discarded_turns: int
    truncated_turns: int
    malformed_calls: int
    repairs: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run. None: not known (yet).

    Attributes:
        run: the folder.
        status: see `RunStatus`.
        reason: short name of why it ended early, "" otherwise.
        message: the same for people.
        steps: optimiser steps done.
        steps_planned: optimiser steps of the whole run.
        eval_first, eval_last: mean held-out reward over the tasks, first and newest evaluation.
        reward_first, reward_last: mean training reward of the first and the newest step.
        tokens_sampled: tokens that engines sampled for training (dropped groups included).
        tokens_trained: tokens that entered the loss.
        token_mismatches: trained tokens that are not bit-equal to the engine's record of them.
        routes_audited: fed tokens whose expert choices were compared with the engine's record; 0 for a dense model.
        route_mismatches: those that differ in any layer.
        engine_restarts: engines started again.
        rollout_worker_restarts: rollout workers started again.
        trainer_restarts: times that the run went back to a checkpoint because its trainer process died.
        evaluations_skipped: evaluations that could not be done; the records say why.
        prompts_given_up: prompts whose attempts were used up.
        failures: groups that failed, by the reason of the first of each kind of fault.
        bias: answers that were `trained`; that were `dropped`, of every attempt at a prompt; and of the last attempt at
            prompts that were `left_out` for good. See `Side`.
        time_to_first_step_s: from process start to the end of the first optimiser step.
        wall_s: time the run has taken, resumed parts added.
        evaluations: every evaluation: step, and mean reward by task.
        sessions: see `Sessions`; None for a task without an agent.
    """

    run: str
    status: str
    reason: str
    message: str
    steps: int
    steps_planned: int | None
    eval_first: float | None
    eval_last: float | None
    reward_first: float | None
    reward_last: float | None
    tokens_sampled: int
    tokens_trained: int
    token_mismatches: int
    routes_audited: int
    route_mismatches: int
    engine_restarts: int
    rollout_worker_restarts: int
    trainer_restarts: int
    evaluations_skipped: int
    prompts_given_up: int
    failures: dict[str, int]
    bias: dict[str, Side]
    time_to_first_step_s: float | None
    wall_s: float
    evaluations: list[dict[str, Any]]
    sessions: Sessions | None


def _sessions(counters: Mapping[str, float]) -> Sessions | None:
    counts = {key.removeprefix("session/"): int(v) for key, v in counters.items() if key.startswith("session/")}
    if not counts:
        return None
    repairs = {key.removeprefix("repairs/"): n for key, n in counts.items() if key.startswith("repairs/")}
    numbers = {field: counts.get(field, 0) for field in Sessions.__struct_fields__ if field != "repairs"}
    return Sessions(**numbers, repairs=repairs)


def _failures(counters: Mapping[str, float]) -> dict[str, int]:
    return {key.removeprefix(FAILURE): int(n) for key, n in counters.items() if key.startswith(FAILURE)}


def evaluations(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`{"step": 0, "<task>": reward, ...}` for every record with an evaluation."""
    found = []
    for record in records:
        tasks = {
            key.removeprefix("eval/").removesuffix("/reward"): value
            for key, value in record.items()
            if key.startswith("eval/") and key.endswith("/reward")
        }
        if tasks:
            found.append({"step": record["step"], **tasks})
    return sorted(found, key=lambda e: e["step"])


def bias(records: list[dict[str, Any]]) -> dict[str, Side]:
    """Trained, dropped and left out answers of all steps together."""
    return {side: _side(records, f"{BIAS_PREFIX}{side}_") for side in ("trained", "dropped", "left_out")}


def _side(records: list[dict[str, Any]], prefix: str) -> Side:
    counted = [r for r in records if r.get(prefix + "trajectories")]

    def mean(name: str) -> float | None:
        known = [(r[prefix + name], r[prefix + "trajectories"]) for r in counted if prefix + name in r]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    answers = int(sum(r[prefix + "trajectories"] for r in counted))
    groups = int(sum(r.get(prefix + "groups", 0) for r in records))
    return Side(groups=groups, answers=answers, length=mean("length"), reward=mean("reward"))


def make_report(path: Path) -> Report:
    """Read a run folder.

    Raises:
        InvalidFieldError: there is no run.
    """
    folder = RunFolder(path)
    if not folder.config_file.exists():
        raise InvalidFieldError("RUN", str(path), "no run there; give the folder that holds config.toml")
    status = folder.read_status()
    records = list(read_jsonl(folder.metrics_file))
    state = status.get("status", RunStatus.STARTING)
    reason, message = status.get("reason", ""), status.get("message", "")
    if state in (RunStatus.STARTING, RunStatus.RUNNING) and not folder.in_use:
        state, reason = RunStatus.DIED, "driver_gone"
        message = "the driver's process is gone; continue the run with train --resume"
    scores = [sum(v for k, v in e.items() if k != "step") / (len(e) - 1) for e in evaluations(records)]
    rewards = [r["rollout/reward"] for r in records if "rollout/reward" in r]
    counters = status.get("counters", {})
    return Report(
        run=str(path),
        status=str(state),
        reason=reason,
        message=message,
        steps=max((r["step"] for r in records), default=0),
        steps_planned=status.get("steps"),
        eval_first=scores[0] if scores else None,
        eval_last=scores[-1] if scores else None,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        tokens_sampled=int(counters.get("tokens_sampled", 0)),
        tokens_trained=int(counters.get("tokens_trained", 0)),
        token_mismatches=int(counters.get("token_mismatches", 0)),
        routes_audited=int(counters.get("routes_audited", 0)),
        route_mismatches=int(counters.get("route_mismatches", 0)),
        engine_restarts=int(counters.get("engine_restarts", 0)),
        rollout_worker_restarts=int(counters.get("rollout_worker_restarts", 0)),
        trainer_restarts=int(counters.get("trainer_restarts", 0)),
        evaluations_skipped=int(counters.get("evaluations_skipped", 0)),
        prompts_given_up=int(counters.get("prompts_given_up", 0)),
        failures=_failures(counters),
        bias=bias(records),
        time_to_first_step_s=status.get("time_to_first_step_s"),
        wall_s=round(counters.get("wall_s", 0.0), 3),
        evaluations=evaluations(records),
        sessions=_sessions(counters),
    )


def rows(report: Report) -> list[tuple[str, str]]:
    """The report as (label, text) for a table."""

    def change(first: float | None, last: float | None) -> str:
        return "-" if first is None or last is None else f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"

    planned = f" of {report.steps_planned}" if report.steps_planned is not None else ""
    found = [
        ("status", report.status + (f": {report.reason}" if report.reason else "")),
        ("steps", f"{report.steps}{planned}"),
        ("held-out reward", change(report.eval_first, report.eval_last)),
        ("training reward", change(report.reward_first, report.reward_last)),
        ("tokens sampled", f"{report.tokens_sampled:,}"),
        ("tokens trained", f"{report.tokens_trained:,}"),
        ("token mismatches", f"{report.token_mismatches:,}"),
        ("time to first step", duration(report.time_to_first_step_s)),
        ("wall time", duration(report.wall_s)),
    ]
    if report.routes_audited:
        found.append(("route mismatches", f"{report.route_mismatches:,} of {report.routes_audited:,}"))
    if report.sessions is not None:
        found += _session_rows(report.sessions)
    if report.engine_restarts:
        found.append(("engine restarts", str(report.engine_restarts)))
    if report.rollout_worker_restarts:
        found.append(("rollout worker restarts", str(report.rollout_worker_restarts)))
    if report.trainer_restarts:
        found.append(("trainer restarts", str(report.trainer_restarts)))
    if report.evaluations_skipped:
        found.append(("evaluations skipped", str(report.evaluations_skipped)))
    found += _left_out_rows(report)
    found.append(("folder", report.run))
    return found


def _left_out_rows(report: Report) -> list[tuple[str, str]]:
    trained, dropped, left_out = (report.bias[side] for side in ("trained", "dropped", "left_out"))
    found: list[tuple[str, str]] = []
    if dropped.answers:
        found.append(("answers trained", _side_text(trained)))
        found.append(("answers dropped", f"{_side_text(dropped)} (of every attempt at a prompt)"))
    if left_out.groups:
        all_prompts = trained.groups + left_out.groups
        found.append(("prompts left out", f"{left_out.groups:,} of {all_prompts:,}; answers: {_side_text(left_out)}"))
    if report.prompts_given_up:
        found.append(("prompts given up", str(report.prompts_given_up)))
    failures = sorted(report.failures.items(), key=lambda item: -item[1])
    found += [("groups failed", f"{count:,}: {reason}") for reason, count in failures[:_FAILURES_SHOWN]]
    if len(failures) > _FAILURES_SHOWN:
        rest = failures[_FAILURES_SHOWN:]
        found.append(("groups failed", f"{sum(count for _, count in rest):,} for {len(rest)} other reasons"))
    return found


def _side_text(side: Side) -> str:
    length = "-" if side.length is None else f"{side.length:,.1f}"
    reward = "-" if side.reward is None else f"{side.reward:.3f}"
    return f"{side.answers:,}, mean length {length}, mean reward {reward}"


def _session_rows(sessions: Sessions) -> list[tuple[str, str]]:
    repairs = ", ".join(f"{kind} {count:,}" for kind, count in sorted(sessions.repairs.items()) if count)
    return [
        ("tokens audited", f"{sessions.tokens_audited:,}, mismatches {sessions.mismatches:,}"),
        ("repairs", repairs or "none"),
        ("branches", f"{sessions.branches:,}"),
        ("turns abandoned", f"{sessions.abandoned_turns:,} of {sessions.turns:,}"),
        ("turns truncated", f"{sessions.truncated_turns:,}"),
    ]


def text(report: Report) -> str:
    """The report for people, without colours."""
    lines = rows(report)
    width = max(len(label) for label, _ in lines)
    body = "\n".join(f"  {label:<{width}}  {value}" for label, value in lines)
    return body + (f"\n\n{report.message}" if report.message else "") + "\n"


def comparison(reports: Sequence[Report]) -> str:
    """Several runs side by side: a column each, `-` where a run has nothing to say under a label."""
    columns = [_by_label(report) for report in reports]
    labels = list(dict.fromkeys(label for report in reports for label, _ in rows(report)))
    cells = [[label, *(column.get(label, "-") for column in columns)] for label in ["folder", *labels]]
    # A label that only some runs have would stand in the order of the first run that has it: the folder is the head.
    cells = [line for index, line in enumerate(cells) if index == 0 or line[0] != "folder"]
    widths = [max(len(line[i]) for line in cells) for i in range(len(reports) + 1)]
    return "".join(
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() + "\n"
        for line in cells
    )


def _by_label(report: Report) -> dict[str, str]:
    """The rows of a report; texts under one label (failures, say) are joined."""
    found: dict[str, str] = {}
    for label, value in rows(report):
        found[label] = f"{found[label]}; {value}" if label in found else value
    return found
