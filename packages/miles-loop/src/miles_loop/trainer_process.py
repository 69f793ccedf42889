"""The trainer's own process: `python -m miles_loop.trainer_process LINK`.

LINK is the number of a connected socket to the driver, or the driver's `host:port`.

It composes the trainer with the sender of weights; requests are answered one after the other. Of a group of several
ranks each is such a process: rank 0 answers the driver, the others answer rank 0. Weights are sent by rank 0, or by all
of them together where the transport has a part for each.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from miles_contracts import Group, MilesError
from miles_loop import trainer_link as link
from miles_loop.expected_checksums import ExpectedChecksums

# Heavy imports on purpose at the top: they run while the driver prepares everything else.
from miles_loop.joint_sending import send_together
from miles_loop.senders import JointSender, WeightSender, every_rank_sends, make_sender
from miles_loop.trainer_server import serve_process
from miles_loop.trainer_team import Team, TrainerMembership, share_request
from miles_sync.messages import AnyBucket
from miles_trainer import Trainer
from miles_trainer.config import TrainerConfig
from miles_trainer.errors import RankLostError, RanksDivergedError
from miles_trainer.ranks import Ranks
from miles_trainer.shares import Share, Step


class TrainerService:
    """State of the process: the trainer, the sender and the update that is being sent.

    Args:
        start: what to train.
        ranks: the trainer group.
        team: the other ranks, where this is the first of several.
    """

    def __init__(self, start: link.Start, ranks: Ranks | None = None, team: Team | None = None) -> None:
        config = TrainerConfig.model_validate(start.config)
        self._team = team
        self.trainer = Trainer(Path(start.model_path), config, seed=start.seed, ranks=ranks)
        if start.checkpoint is not None:
            self.trainer.load(Path(start.checkpoint))
        if team is not None:
            self._require_version(team.answers(link.Started), team)
        self._model, self._backlog_bytes = Path(start.model_path), start.sender.bucket_bytes
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        sends = rank == 0 or every_rank_sends(start.sender)
        self._sender = make_sender(start.sender, rank, size) if sends else None
        self._updates = 0
        self._buckets: Iterator[AnyBucket] = iter(())
        self._update_id = ""
        self._checksums: ExpectedChecksums | None = None

    @property
    def version(self) -> int:
        """Number of optimiser updates in the weights."""
        return self.trainer.version

    def close(self) -> None:
        """Free what the sender holds; the other ranks end."""
        if self._team is not None:
            self._team.close()
        if self._sender is not None:
            self._sender.close()

    def answer(self, request: link.Request) -> link.Reply:
        """Carry out one request."""
        if self._team is not None:
            self._team.require_whole()
        match request:
            case link.TrainStep():
                return self._train(request.groups)
            case link.TrainShare():
                return self._train_share(request)
            case link.Save():
                self.trainer.save(Path(request.directory))
            case link.ExportModel():
                self.trainer.export_hf(Path(request.directory))
            case link.BeginExport(update_id=""):
                # Unique for ever: an engine may outlive this process and must not take our first update for an old one.
                self._updates += 1
                name = f"v{request.version}-{self._updates}-{secrets.token_hex(4)}"
                return self._send_as_group(link.BeginExport(version=request.version, update_id=name))
            case _:
                return self._send_as_group(request)
        return link.Done()

    def _send_as_group(self, request: link.Request) -> link.Reply:
        sender = self._require_sender()
        own = partial(self._send, request, sender)
        if self._team is None or not isinstance(sender, JointSender):
            return own()
        return send_together(self._team, request, own, sender)

    def _send(self, request: link.Request, sender: WeightSender) -> link.Reply:
        """What has to do with weights on their way to the engines."""
        match request:
            case link.Connect():
                specs = self.trainer.weight_manifest().tensors
                return link.Connected(offer=sender.connect(request.receivers, specs, request.split, request.digests))
            case link.BeginExport():
                return self._begin_export(request, sender)
            case link.ExpectChecksums():
                self._open_checksums(request.update_id).expect(request.form)
            case link.NextBucket():
                self._require_update(request.update_id)
                return link.BucketReady(bucket=next(self._buckets, None))
            case link.GetChecksums():
                return link.Checksums(table=self._open_checksums(request.update_id).table(request.form))
            case link.Acknowledge():
                sender.acknowledge(request.update_id, request.index)
            case link.ReleaseExport():
                self._buckets = iter(())
                sender.release(request.update_id)
                self._update_id = ""
                self._close_checksums()
            case _:
                raise MilesError(f"unexpected request {type(request).__name__}")
        return link.Done()

    def _require_sender(self) -> WeightSender:
        if self._sender is None:
            raise MilesError("only rank 0 of a trainer group sends weights by this transport")
        return self._sender

    def _train(self, groups: list[Group]) -> link.StepDone:
        step = self.trainer.prepare(groups)
        team = self._team
        if team is None:
            metrics = self.trainer.train(step.shares[0])
            shared: dict[int, link.ShareDone] = {}
        else:
            metrics, shared = self._train_together(step, team)
        trajectories = [t for group in groups for t in group]
        # Of what other ranks trained they say themselves what it was.
        told = {
            id(t): (turns, rows)
            for rank, done in shared.items()
            for t, turns, rows in zip(step.shares[rank].trajectories, done.turns, done.routes, strict=True)
        }
        digests = [told.get(id(t)) or (link.turn_digests(t), link.row_digests_of(t)) for t in trajectories]
        return link.StepDone(
            version=self.trainer.version,
            metrics={**metrics, **step.metrics, **self.trainer.timings},
            turns=[turns for turns, _ in digests],
            routes=[rows for _, rows in digests],
        )

    def _train_together(self, step: Step, team: Team) -> tuple[dict[str, float], dict[int, link.ShareDone]]:
        """This rank's part and that of the others; an error of one has ended the step on all."""
        team.tell([share_request(share) for share in step.shares[1:]])
        try:
            metrics = self.trainer.train(step.shares[0])
        except (RankLostError, RanksDivergedError) as error:
            raise team.give_up(error) from error
        except Exception:  # raised on; what the others answer must not be taken for answers to the next request
            team.replies()
            raise
        done = team.answers(link.ShareDone)
        self._require_version(done, team)
        return metrics, dict(enumerate(done, start=1))

    def _require_version(self, answers: Sequence[link.Started | link.ShareDone], team: Team) -> None:
        versions = [answer.version for answer in answers]
        if any(version != self.trainer.version for version in versions):
            raise team.give_up(
                RanksDivergedError(f"the other trainer ranks are at versions {versions}, rank 0 at {self.version}")
            )

    def _train_share(self, request: link.TrainShare) -> link.ShareDone:
        share = Share(
            trajectories=tuple(request.trajectories),
            advantages=request.advantages,
            weights=request.weights,
            num_trained=request.num_trained,
            num_members=request.num_members,
        )
        self.trainer.train(share)
        return link.ShareDone(
            version=self.trainer.version,
            turns=[link.turn_digests(t) for t in share.trajectories],
            routes=[link.row_digests_of(t) for t in share.trajectories],
        )

    def _begin_export(self, request: link.BeginExport, sender: WeightSender) -> link.ExportBegun:
        if request.version != self.trainer.version:
            raise MilesError(f"asked to export version {request.version}, the trainer has {self.trainer.version}")
        self._update_id = request.update_id
        manifest = self.trainer.weight_manifest()
        self._close_checksums()
        self._checksums = ExpectedChecksums(self._model, manifest.tensors, self._backlog_bytes)
        tensors = self._checksums.tap(self.trainer.export_weights())
        self._buckets = iter(sender.send(tensors, manifest, self._update_id))
        return link.ExportBegun(update_id=self._update_id, manifest=manifest)

    def _open_checksums(self, update_id: str) -> ExpectedChecksums:
        self._require_update(update_id)
        assert self._checksums is not None  # an open update has them
        return self._checksums

    def _close_checksums(self) -> None:
        """Of an update that is over, or of one whose release got lost."""
        if self._checksums is not None:
            self._checksums.close()
            self._checksums = None

    def _require_update(self, update_id: str) -> None:
        if update_id != self._update_id:
            raise MilesError(f"update {update_id!r} is not open, {self._update_id or 'none'!r} is")


def main() -> None:
    """Serve the driver that the first argument names."""
    membership = TrainerMembership()
    serve_process(sys.argv[1], lambda start: TrainerService(start, *membership.meet(start)), membership)


if __name__ == "__main__":
    main()
