"""Counters and timings of a session server, written out as Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from miles_rollout.session.audit import SessionCounters

BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper edges of the histogram buckets, seconds."""

_HELP: Final = {
    "sessions_open": "Sessions open now.",
    "sessions_opened_total": "Sessions opened.",
    "sessions_expired_total": "Sessions closed because nobody used them.",
    "turns_total": "Turns committed.",
    "new_prompt_tokens_total": "Prompt tokens that were rendered (histories are not rendered again).",
    "sampled_tokens_total": "Tokens sampled in committed turns.",
    "cached_tokens_total": "Prompt tokens that engines found in their prefix caches.",
    "errors_total": "Requests refused or failed, by code.",
    "turn_seconds": "Time from request to answer.",
    "engine_seconds": "Part of it spent waiting for the engine.",
    "session": "Counters of closed sessions, by event.",
    "ignored_fields_total": "Requests with a field that nothing is known about, by name.",
    "repairs_total": "Turns of closed sessions that stayed trainable thanks to a repair, by kind.",
}


_LABELLED: Final = ("errors_total", "ignored_fields_total", "repairs_total")


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.closed = SessionCounters()
        self._counts: dict[str, float] = dict.fromkeys(
            (n for n in _HELP if n.endswith("_total") and n not in _LABELLED), 0.0
        )
        self._errors: dict[str, int] = {}
        self._histograms: dict[str, list[int]] = {
            n: [0] * (len(BOUNDS) + 1) for n in ("turn_seconds", "engine_seconds")
        }
        self._sums: dict[str, float] = dict.fromkeys(self._histograms, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        self._counts[name] += amount

    def error(self, code: str) -> None:
        """Count a refusal or failure."""
        self._errors[code] = self._errors.get(code, 0) + 1

    def observe(self, name: str, seconds: float) -> None:
        """Note a duration."""
        self._histograms[name][bisect_left(BOUNDS, seconds)] += 1
        self._sums[name] += seconds

    def close_session(self, counters: SessionCounters) -> None:
        """Add up what happened in a session that is over."""
        self.closed = self.closed + counters

    def text(self, sessions_open: int, open_counters: SessionCounters) -> str:
        """Prometheus text exposition (format version 0.0.4).

        Args:
            sessions_open: how many are open.
            open_counters: what happened in those.
        """
        lines: list[str] = []

        def head(name: str, kind: str) -> None:
            lines.append(f"# HELP miles_session_{name} {_HELP[name]}")
            lines.append(f"# TYPE miles_session_{name} {kind}")

        head("sessions_open", "gauge")
        lines.append(f"miles_session_sessions_open {sessions_open}")
        for name, value in self._counts.items():
            head(name, "counter")
            lines.append(f"miles_session_{name} {value:g}")
        head("errors_total", "counter")
        lines += [f'miles_session_errors_total{{code="{c}"}} {n}' for c, n in sorted(self._errors.items())]
        total = self.closed + open_counters
        for name, value in total.to_metrics().items():
            if "/" in name or name in ("turns", "sampled_tokens", "ignored_fields"):
                continue
            lines.append(f"# TYPE miles_session_{name}_total counter")
            lines.append(f"miles_session_{name}_total {value:g}")
        head("repairs_total", "counter")
        lines += [f'miles_session_repairs_total{{kind="{k}"}} {n}' for k, n in sorted(total.repairs.items())]
        head("ignored_fields_total", "counter")
        for field, n in sorted(total.ignored_fields.items()):
            label = field.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'miles_session_ignored_fields_total{{field="{label}"}} {n}')
        for name, buckets in self._histograms.items():
            head(name, "histogram")
            seen = 0
            for bound, count in zip((*BOUNDS, float("inf")), buckets, strict=True):
                seen += count
                edge = "+Inf" if bound == float("inf") else f"{bound:g}"
                lines.append(f'miles_session_{name}_bucket{{le="{edge}"}} {seen}')
            lines.append(f"miles_session_{name}_sum {self._sums[name]:.6f}")
            lines.append(f"miles_session_{name}_count {seen}")
        return "\n".join(lines) + "\n"
