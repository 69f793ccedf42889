"""A trainer process without a model: its loss is a digest of everything it ever trained on, in order.

Two runs that trained different prompts, or the same in another order, or sampled other tokens, report other losses.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from miles_contracts import Group, WeightManifest
from miles_loop import trainer_link as link
from miles_loop.trainer_server import serve_process

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.02"))


class NonFiniteError(Exception):
    """As the real trainer raises it."""


class FakeTrainer:
    """Counts versions and chains digests."""

    def __init__(self, start: link.Start) -> None:
        self.version = 0
        self.chain = hashlib.blake2b(str(start.seed).encode(), digest_size=8).hexdigest()
        if start.checkpoint is not None:
            state = json.loads((Path(start.checkpoint) / "trainer.json").read_text())
            self.version, self.chain = state["version"], state["chain"]

    def close(self) -> None:
        """Nothing is held."""

    def answer(self, request: link.Request) -> link.Reply:
        """As the real one."""
        match request:
            case link.TrainStep():
                return self.train(request.groups)
            case link.BeginExport():
                assert request.version == self.version
                manifest = WeightManifest(version=self.version, tensors=())
                return link.ExportBegun(update_id=f"u{self.version}-{time.time_ns()}", manifest=manifest)
            case link.NextBucket():
                return link.BucketReady(bucket=None)
            case link.Save():
                self.save(Path(request.directory))
            case link.ExportModel():
                self.export(Path(request.directory))
                self.write_state(Path(request.directory))  # which the real one does not: tests read the version
        return link.Done()

    def train(self, groups: list[Group]) -> link.StepDone:
        """One step."""
        time.sleep(STEP_S)
        if self.version + 1 == int(os.environ.get("FAKE_NAN_STEP", "-1")):
            raise NonFiniteError("loss is NaN in micro-batch 0")
        turns = [[link.turn_digest(t, turn.start, turn.end) for turn in t.turns] for g in groups for t in g]
        told = [[g.prompt_index, g.attempt, [t.reward for t in g]] for g in groups]
        seen = json.dumps([self.chain, turns, told]).encode()
        self.chain = hashlib.blake2b(seen, digest_size=8).hexdigest()
        self.version += 1
        loss = int(self.chain, 16) / 2**64
        tokens = float(sum(t.num_trained for g in groups for t in g))
        metrics = {"loss": loss, "tokens": tokens}
        return link.StepDone(version=self.version, metrics=metrics, turns=turns, routes=link.route_digests(groups))

    def save(self, directory: Path) -> None:
        """State, and something that stands for a model."""
        (directory / "hf").mkdir()
        self.export(directory / "hf")
        self.write_state(directory)

    def export(self, directory: Path) -> None:
        """Something that stands for a model."""
        size = int(os.environ.get("FAKE_MODEL_BYTES", "1024"))
        save_file({"weight": np.zeros(size, np.uint8)}, directory / "model.safetensors")

    def write_state(self, directory: Path) -> None:
        """Where training is."""
        state = {"version": self.version, "chain": self.chain}
        (directory / "trainer.json").write_text(json.dumps(state))


if __name__ == "__main__":
    serve_process(sys.argv[1], FakeTrainer)
