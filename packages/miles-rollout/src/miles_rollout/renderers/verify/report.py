"""What a verification found, and its table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Of one check on one conversation."""

    OK = "ok"
    FAIL = "FAIL"
    NO_FORM = "no form"  # the family says that it cannot express the conversation
    NOT_APPLICABLE = "-"


CHECKS = ("append-only", "suffix", "spelling", "forced stop", "views", "literal text", "forced call")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The checks on one conversation.

    Attributes:
        conversation: its name.
        turns: assistant turns in it.
        tokens: ids of the whole rendering.
        outcomes: per check of `CHECKS`.
        details: of everything that is not ok.
    """

    conversation: str
    turns: int
    tokens: int
    outcomes: dict[str, Outcome]
    details: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True when any check failed."""
        return Outcome.FAIL in self.outcomes.values()


@dataclass(frozen=True, kw_only=True)
class Report:
    """A verification.

    Attributes:
        family: name of the family.
        findings: per conversation.
        controls: per renderer broken on purpose whether the checks caught it (None: no difference in this family).
    """

    family: str
    findings: tuple[Finding, ...]
    controls: dict[str, bool | None]

    @property
    def ok(self) -> bool:
        """True when nothing failed and every control was caught."""
        return not any(f.failed for f in self.findings) and False not in self.controls.values()

    def table(self) -> str:
        """The report as aligned text."""
        header = ("conversation", "turns", "tokens", *CHECKS)
        rows = [
            (f.conversation, str(f.turns), str(f.tokens), *(f.outcomes.get(c, Outcome.NOT_APPLICABLE) for c in CHECKS))
            for f in self.findings
        ]
        lines = aligned([header, *rows])
        lines += [f"  {f.conversation}: {detail}" for f in self.findings for detail in f.details]
        words = {True: "caught", False: "NOT CAUGHT", None: "- (makes no difference in this family)"}
        lines += ["", "renderers broken on purpose"]
        lines += aligned([(name, words[caught]) for name, caught in self.controls.items()])
        failed = sum(f.failed for f in self.findings)
        verdict = "append-only" if self.ok else f"NOT proven append-only: {failed} conversations failed"
        return "\n".join([*lines, "", f"{self.family}: {verdict} ({len(self.findings)} conversations)"]) + "\n"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines with columns of equal width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
