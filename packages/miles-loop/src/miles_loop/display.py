"""Shows a run while it runs: a live panel on a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import itertools
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from miles_loop.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_BLOCKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """Something that shows progress. Enter it before the run, leave it after."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def phase(self, progress: Progress) -> None:
        """The driver waits for something else now."""

    def step(self, progress: Progress) -> None:
        """A record was written."""

    def note(self, text: str) -> None:
        """Something happened that people should know."""


def make_display(*, plain: bool, stream: TextIO | None = None) -> Display:
    """The live panel when `stream` (default: standard output) is a terminal and `plain` is false."""
    stream = stream or sys.stdout
    return PlainDisplay(stream) if plain or not stream.isatty() else LiveDisplay(stream)


def duration(seconds: float | None) -> str:
    """`7.4 s`, `2 min 05 s`, `3 h 10 min`; `?` for an unknown one."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def step_line(progress: Progress) -> str:
    """The latest record in one line."""
    record = progress.latest
    parts = [f"step {progress.step}/{progress.steps}"]
    for key, label, form in (
        ("rollout/reward", "reward", ".3f"),
        ("train/loss", "loss", ".4f"),
        ("perf/rollout_tokens_per_s", "rollout tok/s", ",.0f"),
        ("perf/trainer_tokens_per_s", "trainer tok/s", ",.0f"),
        ("rollout/fully_async/avg_staleness", "staleness", ".2f"),
        ("perf/step_s", "s/step", ".2f"),
    ):
        if key in record:
            parts.append(f"{label} {record[key]:{form}}")
    parts += [
        f"{key} {value:.3f}" for key, value in record.items() if key.startswith("eval/") and key.endswith("/reward")
    ]
    if progress.step < progress.steps and progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


class PlainDisplay:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def phase(self, progress: Progress) -> None:
        """Only the phases before the first step are worth a line."""
        if progress.step == 0 and not progress.latest and progress.phase != self._phase:
            self._phase = progress.phase
            self._line(f"{progress.phase} ...")

    def step(self, progress: Progress) -> None:
        """One line a record."""
        self._line(step_line(progress))

    def note(self, text: str) -> None:
        """The text as it is."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveDisplay:
    """A panel that is redrawn in place (rich)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> LiveDisplay:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=self._stream), get_renderable=self._render, refresh_per_second=4, transient=False
        )
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)
            self._live = None

    def phase(self, progress: Progress) -> None:
        """Shown at the next redraw."""
        self._progress = progress

    def step(self, progress: Progress) -> None:
        """Shown at the next redraw."""
        self._progress = progress

    def note(self, text: str) -> None:
        """Printed above the panel."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)

    def _render(self) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        progress = self._progress
        if progress is None:
            return Panel("starting", title="miles")
        record = progress.latest
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{progress.step}/{progress.steps}  {bar(progress.step / progress.steps)}")
        table.add_row("now", progress.phase)
        rewards = [value for _, value in progress.rewards]
        if rewards:
            table.add_row("reward", f"{rewards[-1]:.3f}  {sparkline(rewards)}")
        if progress.evaluations:
            first, last = progress.evaluations[0][1], progress.evaluations[-1][1]
            table.add_row("held out", f"{first:.3f} -> {last:.3f} (step {progress.evaluations[-1][0]})")
        for label, key, form in (
            ("loss", "train/loss", ".4f"),
            ("rollout", "perf/rollout_tokens_per_s", ",.0f"),
            ("trainer", "perf/trainer_tokens_per_s", ",.0f"),
            ("staleness", "rollout/fully_async/avg_staleness", ".2f"),
        ):
            if key in record:
                unit = " tokens/s" if key.endswith("per_s") else ""
                table.add_row(label, f"{record[key]:{form}}{unit}")
        if progress.counters["token_mismatches"]:
            table.add_row("[red]token mismatches", f"{progress.counters['token_mismatches']:.0f}")
        if progress.counters["route_mismatches"]:
            table.add_row("[red]route mismatches", f"{progress.counters['route_mismatches']:.0f}")
        table.add_row("time left", duration(progress.seconds_left))
        return Panel(table, title="miles", title_align="left", expand=False)


def bar(fraction: float, width: int = 24) -> str:
    """A progress bar of `width` cells."""
    full = round(max(0.0, min(1.0, fraction)) * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: list[float], width: int = 32) -> str:
    """The course of a series in one line of blocks, lowest to highest value; averaged when longer than `width`."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] for v in values)
