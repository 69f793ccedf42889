"""What an update did and how long each part took."""

from __future__ import annotations

import msgspec

from miles_sync.transaction import Fault


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
        return out
