"""The update of a fleet as a state machine without sockets, tasks or clocks.

    INSPECT -> PAUSE -> BEGIN -> TRANSFER -> COMMIT -> CONFIRM -> [CANARY] -> RESUME -> DONE
                 |        |         |          |          |          |
                 |        |         |          |          |        PAUSE
                 +--------+---------+----------+----------+----------+--> ROLLBACK -> CONFIRM -> RESUME -> DONE

Each phase is one round: the same request to every engine concerned, then all answers at once. The guarantee: all
engines that an update resumes serve one and the same version. It rests on these rules.

1. Nobody is told to commit before everybody has verified every tensor. Until then any failure goes back.
2. A commit whose answer is lost is settled by asking for the engine's version. If any engine has committed, the
   update goes forward and an engine that has not is *fenced*. If none has, the update goes back.
3. Only an engine whose version is known to be the chosen one is resumed. A fenced engine stays paused (or is dead)
   and is named, for its supervisor to restart or for the next update to heal.
4. An engine that has rolled an update back refuses a late commit of it. That is the engine's part of the contract,
   and why after a commit round only an acknowledged rollback counts.

A commit may still be under way when its caller has given up. Every other request is assumed to be executed before a
later one to the same engine is answered, or never. A killed driver needs no rule of its own: wherever it dies, the
engines that run are of one version, and the next update begins with whatever it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from miles_contracts import InvalidFieldError


class Phase(StrEnum):
    """What the engines are asked to do in a round."""

    INSPECT = "inspect"
    PAUSE = "pause"
    BEGIN = "begin"
    TRANSFER = "transfer"
    COMMIT = "commit"
    CONFIRM = "confirm"
    CANARY = "canary"
    ROLLBACK = "rollback"
    RESUME = "resume"
    DONE = "done"


class Decision(StrEnum):
    """Where the fleet is going."""

    OPEN = "open"
    FORWARD = "forward"
    BACK = "back"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back from one engine in one round.

    Attributes:
        ok: the engine said that it did as asked.
        refused: the engine answered that it did not. When neither, there was no answer, and it may have.
        version: for INSPECT and CONFIRM, the version that the engine serves (None: it does not know).
        reason: why not, for people.
        tensor: the tensor that the reason is about.
    """

    ok: bool
    refused: bool = False
    version: int | None = None
    reason: str = ""
    tensor: str | None = None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong; `engine` is None when it was the sender or the driver."""

    phase: Phase
    engine: str | None
    reason: str
    tensor: str | None = None


_BEFORE_COMMIT = (Phase.PAUSE, Phase.BEGIN, Phase.TRANSFER)
_NEXT = {
    Phase.PAUSE: Phase.BEGIN,
    Phase.BEGIN: Phase.TRANSFER,
    Phase.TRANSFER: Phase.COMMIT,
}


class Transaction:
    """One update of one fleet: ask `phase` and `targets`, do it, give the answers to `advance`, until DONE.

    Args:
        engines: names of the engines, unique.
        version: the version that the update brings.
        canary: whether the new policy is probed before the update counts. A probe resumes its engine; when a probe
            answers wrongly, all engines are paused again before anything else.

    Raises:
        InvalidFieldError: no engines, or one twice.
    """

    def __init__(self, engines: Sequence[str], version: int, *, canary: bool = False) -> None:
        if not engines:
            raise InvalidFieldError("engines", list(engines), "an update needs at least one engine")
        if len(set(engines)) != len(engines):
            raise InvalidFieldError("engines", list(engines), "name every engine once")
        self.engines = tuple(engines)
        self.version = version
        self.phase = Phase.INSPECT
        self.decision = Decision.OPEN
        self.faults: list[Fault] = []
        self.before: dict[str, int | None] = {}
        """Version of each engine at the start."""
        self.serving: tuple[str, ...] = ()
        """Engines that serve when the update is DONE; all of one version."""
        self._canary = canary
        self._commit_asked = False
        self._refused: set[str] = set()
        self._committed: set[str] = set()
        self._rolled_back: set[str] = set()
        self._settled: set[str] = set()

    @property
    def targets(self) -> tuple[str, ...]:
        """The engines that the current phase addresses."""
        if self.phase is Phase.DONE:
            return ()
        if self.phase in (Phase.RESUME, Phase.CANARY):
            return tuple(e for e in self.engines if e in self._settled)
        return self.engines

    @property
    def fenced(self) -> tuple[str, ...]:
        """Engines that are paused, dead or out of reach. Final when DONE."""
        return tuple(e for e in self.engines if e not in self.serving)

    def fail(self, reason: str, tensor: str | None = None) -> None:
        """The sender or the driver cannot go on. Before the commit round this goes back; later it is only noted."""
        self.faults.append(Fault(phase=self.phase, engine=None, reason=reason, tensor=tensor))
        if self.phase is Phase.INSPECT:
            self._leave_untouched()
        elif self.phase in _BEFORE_COMMIT and self.decision is Decision.OPEN:
            self._go_back()

    def advance(self, answers: Mapping[str, Answer]) -> None:
        """Take the answers of all targets of the current phase and move to the next.

        Raises:
            InvalidFieldError: a target's answer is missing.
        """
        missing = [e for e in self.targets if e not in answers]
        if missing:
            raise InvalidFieldError("answers", sorted(answers), f"every target answers; missing {missing}")
        bad = [e for e in self.targets if not answers[e].ok]
        for engine in bad:
            answer = answers[engine]
            self.faults.append(Fault(phase=self.phase, engine=engine, reason=answer.reason, tensor=answer.tensor))
        if self.phase is Phase.INSPECT:
            self._after_inspect(answers, bad)
        elif self.phase is Phase.PAUSE and self.decision is Decision.BACK:
            self._after_repause(bad)
        elif self.phase in _BEFORE_COMMIT:
            self._after_preparation(bad)
        elif self.phase is Phase.COMMIT:
            self._after_commit(answers)
        elif self.phase is Phase.ROLLBACK:
            self._rolled_back = set(self.engines) - set(bad)
            self.phase = Phase.CONFIRM
        elif self.phase is Phase.CONFIRM:
            self._after_confirm(answers)
        elif self.phase is Phase.CANARY:
            self._after_canary(answers)
        elif self.phase is Phase.RESUME:
            self.serving = tuple(e for e in self.targets if e not in bad)
            self.phase = Phase.DONE

    def _leave_untouched(self) -> None:
        """Nobody was asked to change anything yet: the fleet goes on as it was."""
        self.decision = Decision.BACK
        unreachable = {f.engine for f in self.faults}
        self.serving = tuple(e for e in self.engines if e not in unreachable)
        self.phase = Phase.DONE

    def _go_back(self) -> None:
        self.decision = Decision.BACK
        self.phase = Phase.ROLLBACK

    def _after_inspect(self, answers: Mapping[str, Answer], bad: Sequence[str]) -> None:
        self.before = {e: a.version for e, a in answers.items() if a.ok}
        if bad:
            self._leave_untouched()
        else:
            self.phase = Phase.PAUSE

    def _after_preparation(self, bad: Sequence[str]) -> None:
        if bad:
            self._go_back()
            return
        self.phase = _NEXT[self.phase]
        self._commit_asked = self.phase is Phase.COMMIT

    def _after_commit(self, answers: Mapping[str, Answer]) -> None:
        self._committed = {e for e in self.engines if answers[e].ok}
        self._refused = {e for e in self.engines if answers[e].refused}
        if len(self._refused) == len(self.engines):
            self._go_back()
        else:
            # Also when nobody answered: only the engines' versions can tell which way to go.
            self.phase = Phase.CONFIRM

    def _after_confirm(self, answers: Mapping[str, Answer]) -> None:
        now = {e: answers[e].version for e in self.engines if answers[e].ok}
        if self.decision is Decision.BACK:
            self._settle_back(now)
            return
        # A version proves a commit only where it was another one before; otherwise the commit's answer has to.
        proven = {e for e, v in now.items() if v == self.version and self.before[e] != self.version}
        contradicted = {e for e, v in now.items() if v != self.version}
        self._committed = (self._committed | proven) - contradicted
        if not self._committed:
            self._go_back()
            return
        self.decision = Decision.FORWARD
        self._settled = self._committed & set(now)
        self._note_unsettled(now, f"is not known to serve version {self.version}")
        self.phase = Phase.CANARY if self._canary and self._settled else Phase.RESUME

    def _after_canary(self, answers: Mapping[str, Answer]) -> None:
        """A wrong answer condemns the weights; no answer condemns the engine, which is at the new version anyway."""
        if any(answers[e].refused for e in self.targets):
            self.decision = Decision.BACK
            self.phase = Phase.PAUSE
        else:
            self._settled = {e for e in self.targets if answers[e].ok}
            self.phase = Phase.RESUME

    def _after_repause(self, bad: Sequence[str]) -> None:
        """While any engine may still be running with the condemned weights, no other may run with the old ones."""
        if not bad:
            self.phase = Phase.ROLLBACK
            return
        self._settled = set()
        self._note_unsettled({}, f"is not served: {', '.join(bad)} may run with the condemned weights")
        self.phase = Phase.DONE

    def _settle_back(self, now: Mapping[str, int | None]) -> None:
        old = {e for e, version in now.items() if self._serves_old(e, version)}
        votes = Counter(now[e] for e in old)
        if votes:
            # The fleet may have been mixed before (a restarted engine, a dead driver): one version goes on.
            chosen = max(votes, key=lambda version: (votes[version], -1 if version is None else version))
            old = {e for e in old if now[e] == chosen}
        self._settled = old
        self._note_unsettled(now, "is not known to serve the version that goes on")
        self.phase = Phase.RESUME

    def _serves_old(self, engine: str, version: int | None) -> bool:
        if version != self.before[engine]:
            return False
        if not self._commit_asked or engine in self._refused:
            return True
        # Equal numbers prove nothing about an engine that may have committed, and a late commit must be impossible.
        return version != self.version and engine in self._rolled_back

    def _note_unsettled(self, now: Mapping[str, int | None], reason: str) -> None:
        for engine in self.engines:
            if engine not in self._settled:
                seen = f" (it reports {now[engine]})" if engine in now else ""
                self.faults.append(Fault(phase=self.phase, engine=engine, reason=reason + seen))
