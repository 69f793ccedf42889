"""What an update did and how long each part took."""

from __future__ import annotations

import msgspec

from miles_sync.transaction import Fault


class WeightCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How far an engine's own checksums of an update were held against those of the tensors that were sent.

    Attributes:
        engine: its url.
        compared: parameters whose checksums were equal; one that differs ends the update.
        not_compared: parameters by the reason why nothing can be said of them.
        engine_s: the engine's time to hash everything it serves.
        trainer_s: the trainer's time to hash what it sends, beside the sending.
        waited_s: what of that the update had to wait for.
    """

    engine: str
    compared: int = 0
    not_compared: dict[str, int] = {}
    engine_s: float = 0.0
    trainer_s: float = 0.0
    waited_s: float = 0.0

    def __str__(self) -> str:
        total = self.compared + sum(self.not_compared.values())
        text = f"{self.compared} of {total} parameters of {self.engine} are held against the trainer's"
        reasons = "; ".join(f"{count}: {reason}" for reason, count in sorted(self.not_compared.items()))
        return f"{text}; not compared are {reasons}" if reasons else text


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one update. Times in seconds.

    Attributes:
        update_id: name of the transaction.
        version: the version that it brought.
        previous: version of each engine before, None where it did not know.
        serving: engines that serve the outcome.
        fenced: engines that were left paused, dead or out of reach.
        num_tensors, num_bytes: of the manifest.
        num_buckets: buckets sent.
        pause_s: asking all engines to pause.
        begin_s: manifest from the source and to all engines.
        transfer_s: all buckets, from the first request to the last acknowledgement; engines digest as they load.
        commit_s: swapping the new weights in.
        verify_s: asking every engine for its version.
        canary_s: probing the new policy.
        resume_s: letting all engines go on.
        paused_s: from the first pause request to the last resume answer: what generation loses.
        total_s: the whole call.
        faults: everything that went wrong, also when the update went through.
        checks: of engines that hash their parameters in a way of their own; others verify digests as they load.
    """

    update_id: str
    version: int
    previous: dict[str, int | None]
    serving: tuple[str, ...]
    fenced: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    num_buckets: int = 0
    pause_s: float = 0.0
    begin_s: float = 0.0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    verify_s: float = 0.0
    canary_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0
    total_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    checks: tuple[WeightCheck, ...] = ()

    def metrics(self) -> dict[str, float]:
        """The numbers under the names of `metrics.jsonl`."""
        out = {
            f"perf/update_weights_{name}": float(getattr(self, name))
            for name in ("pause_s", "begin_s", "transfer_s", "commit_s", "verify_s", "canary_s", "resume_s", "paused_s")
        }
        out["perf/update_weights_s"] = self.total_s
        out["perf/update_weights_bytes"] = float(self.num_bytes)
        out["perf/update_weights_buckets"] = float(self.num_buckets)
        out["perf/update_weights_fenced"] = float(len(self.fenced))
        if self.checks:
            out["perf/update_weights_compared"] = float(sum(c.compared for c in self.checks))
            out["perf/update_weights_not_compared"] = float(sum(sum(c.not_compared.values()) for c in self.checks))
            out["perf/update_weights_engine_checksum_s"] = max(c.engine_s for c in self.checks)
            out["perf/update_weights_trainer_checksum_s"] = max(c.trainer_s for c in self.checks)
            out["perf/update_weights_checksum_wait_s"] = max(c.waited_s for c in self.checks)
        return out
