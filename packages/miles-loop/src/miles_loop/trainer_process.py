"""The trainer's own process: `python -m miles_loop.trainer_process LINK`.

LINK is the number of a connected socket to the driver, or the driver's `host:port`.

It composes the trainer with the sender of weights; requests are answered one after the other.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from miles_contracts import Group, MilesError
from miles_loop import trainer_link as link

# Heavy imports on purpose at the top: they run while the driver prepares everything else.
from miles_loop.senders import make_sender
from miles_loop.trainer_server import serve_process
from miles_sync.messages import AnyBucket
from miles_trainer import Trainer
from miles_trainer.config import TrainerConfig


class TrainerService:
    """State of the process: the trainer, the sender and the update that is being sent."""

    def __init__(self, start: link.Start) -> None:
        config = TrainerConfig.model_validate(start.config)
        self.trainer = Trainer(Path(start.model_path), config, seed=start.seed)
        if start.checkpoint is not None:
            self.trainer.load(Path(start.checkpoint))
        self._sender = make_sender(start.sender)
        self._updates = 0
        self._buckets: Iterator[AnyBucket] = iter(())
        self._update_id = ""

    @property
    def version(self) -> int:
        """Number of optimiser updates in the weights."""
        return self.trainer.version

    def close(self) -> None:
        """Free what the sender holds."""
        self._sender.close()

    def answer(self, request: link.Request) -> link.Reply:
        """Carry out one request."""
        match request:
            case link.TrainStep():
                return self._train(request.groups)
            case link.Connect():
                specs = self.trainer.weight_manifest().tensors
                return link.Connected(offer=self._sender.connect(request.receivers, specs, request.split))
            case link.BeginExport():
                return self._begin_export(request.version)
            case link.NextBucket():
                self._require_update(request.update_id)
                return link.BucketReady(bucket=next(self._buckets, None))
            case link.Acknowledge():
                self._sender.acknowledge(request.update_id, request.index)
            case link.ReleaseExport():
                self._buckets = iter(())
                self._sender.release(request.update_id)
                self._update_id = ""
            case link.Save():
                self.trainer.save(Path(request.directory))
            case link.ExportModel():
                self.trainer.export_hf(Path(request.directory))
            case _:
                raise MilesError(f"unexpected request {type(request).__name__}")
        return link.Done()

    def _train(self, groups: list[Group]) -> link.StepDone:
        turns = [[link.turn_digest(t, turn.start, turn.end) for turn in t.turns] for group in groups for t in group]
        routes = link.route_digests(groups)
        metrics = self.trainer.train_step(groups) | self.trainer.timings
        return link.StepDone(version=self.trainer.version, metrics=metrics, turns=turns, routes=routes)

    def _begin_export(self, version: int) -> link.ExportBegun:
        if version != self.trainer.version:
            raise MilesError(f"asked to export version {version}, the trainer has {self.trainer.version}")
        self._updates += 1
        # Unique for ever: an engine may outlive this process and must not take our first update for an old one.
        self._update_id = f"v{version}-{self._updates}-{secrets.token_hex(4)}"
        manifest = self.trainer.weight_manifest()
        self._buckets = iter(self._sender.send(self.trainer.export_weights(), manifest, self._update_id))
        return link.ExportBegun(update_id=self._update_id, manifest=manifest)

    def _require_update(self, update_id: str) -> None:
        if update_id != self._update_id:
            raise MilesError(f"update {update_id!r} is not open, {self._update_id or 'none'!r} is")


def main() -> None:
    """Serve the driver that the first argument names."""
    serve_process(sys.argv[1], TrainerService)


if __name__ == "__main__":
    main()
