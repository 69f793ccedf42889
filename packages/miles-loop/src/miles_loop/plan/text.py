"""The answer of `miles plan` as a table, as one JSON object, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_loop.files import write_atomic
from miles_loop.plan.outcome import Outcome

PICTURES = (".png", ".pdf", ".svg")
"""Formats of a picture, by the end of its file's name."""
ROWS = (
    ("step_s", "seconds a step (mean)", "{:.3g}"),
    ("median_step_s", "seconds a step (median)", "{:.3g}"),
    ("of_bound", "of what either half could do alone", "{:.0%}"),
    ("trainer_idle", "trainer waits", "{:.1%}"),
    ("engine_idle", "engines compute nothing", "{:.1%}"),
    ("avg_staleness", "staleness, mean", "{:.2f}"),
    ("max_staleness", "staleness, largest", "{:.0f}"),
    ("queue_size", "groups left waiting, mean", "{:.1f}"),
    ("largest_buffer", "groups waiting, most", "{:.0f}"),
    ("in_flight", "trajectories in flight after a step", "{:.1f}"),
    ("trajectories_per_s", "trajectories a second", "{:.3g}"),
    ("prefix_hit_rate", "prefix-cache hit rate", "{:.1%}"),
    ("dropped_groups", "groups dropped", "{:.0f}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What somebody measured: seconds of a step (mean or median), where, and at which depth."""

    step_s: float
    median: bool
    source: str
    depth: str

    def predicted(self, outcome: Outcome) -> float:
        """The same figure of a simulated run."""
        return outcome.median_step_s if self.median else outcome.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found.

    Attributes:
        outcomes: one for each depth, in order.
        rollout_alone_s, training_alone_s: seconds of a step whose other half takes no time.
        assumptions: in words.
        published: what was measured, or None.
    """

    outcomes: Mapping[str, Outcome]
    rollout_alone_s: float
    training_alone_s: float
    assumptions: Sequence[str]
    published: Measured | None

    @property
    def bound_s(self) -> float:
        """Seconds of a step below which nothing gets."""
        return max(self.rollout_alone_s, self.training_alone_s)

    def figures(self, depth: str) -> dict[str, float]:
        """Numbers of one depth."""
        found = self.outcomes[depth].figures()
        return found | {"of_bound": self.bound_s / found["step_s"]}

    def as_json(self) -> dict[str, Any]:
        """Everything, for scripts."""
        out: dict[str, Any] = {
            "depths": {depth: self.figures(depth) for depth in self.outcomes},
            "rollout_alone_s": self.rollout_alone_s,
            "training_alone_s": self.training_alone_s,
            "bound_s": self.bound_s,
            "assumptions": list(self.assumptions),
        }
        if self.published is not None:
            real = self.published
            out["published"] = {"step_s": real.step_s, "source": real.source, "depth": real.depth}
            if real.depth in self.outcomes:
                out["published"]["error"] = real.predicted(self.outcomes[real.depth]) / real.step_s - 1.0
        return out


def name_of(depth: int | str) -> str:
    """A pipeline depth in words."""
    return "fully asynchronous" if isinstance(depth, str) else f"depth {depth}"


def table(answer: Answer) -> str:
    """The answer for people."""
    lines = ["assumed:"] if answer.assumptions else []
    lines += [f"  - {text}" for text in answer.assumptions]
    lines += [
        "",
        f"rollout alone {answer.rollout_alone_s:.3g} s a step, training alone {answer.training_alone_s:.3g} s; "
        f"no schedule is faster than {answer.bound_s:.3g} s",
        "",
        f"{'':36}" + "".join(f"{depth:>20}" for depth in answer.outcomes),
    ]
    for key, title, form in ROWS:
        cells = [form.format(answer.figures(depth)[key]) for depth in answer.outcomes]
        lines.append(f"{title:36}" + "".join(f"{cell:>20}" for cell in cells))
    if answer.published is not None:
        real = answer.published
        which = "median" if real.median else "mean"
        lines += ["", f"measured:  {real.step_s:.3g} s a step ({which}; {real.source}, {real.depth})"]
        if real.depth in answer.outcomes:
            made = real.predicted(answer.outcomes[real.depth])
            lines.append(f"predicted: {made:.3g} s, {made / real.step_s - 1:+.1%}")
    return "\n".join(lines).lstrip("\n") + "\n"


def draw(answer: Answer, target: Path) -> None:
    """A picture: seconds of a step by what they are spent on, and staleness, for each depth.

    Args:
        answer: what was found.
        target: file to write; its name ends in one of `PICTURES`, which says the format.

    Raises:
        DiskFullError: no room.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = list(answer.outcomes)
    found = [answer.outcomes[name] for name in names]
    train = [o.train_s for o in found]
    wait = [o.step_s * o.trainer_idle for o in found]
    rest = [o.step_s - a - b for o, a, b in zip(found, train, wait, strict=True)]
    below = [0.0] * len(found)
    for label, part, colour in (
        ("optimiser step", train, "#1f5f99"),
        ("weight update and rest", rest, "#9ab8d4"),
        ("waiting for a batch", wait, "#d9a05b"),
    ):
        left.bar(names, part, bottom=below, label=label, color=colour)
        below = [a + b for a, b in zip(below, part, strict=True)]
    left.axhline(answer.bound_s, color="black", linewidth=1, linestyle="--", label="slower half alone")
    left.set_ylabel("seconds a step")
    left.legend(fontsize=8)
    right.bar(names, [o.max_staleness for o in found], color="#9ab8d4", label="largest")
    right.bar(names, [o.avg_staleness for o in found], color="#1f5f99", label="mean")
    right.set_ylabel("staleness in updates")
    right.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format=target.suffix[1:].lower())
    write_atomic(target, picture.getvalue())
