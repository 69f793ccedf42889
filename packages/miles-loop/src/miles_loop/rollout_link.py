"""What driver and rollout worker say to each other: one wire frame a message, in order, any number on their way.

    driver                                           worker
      Start            what a run is made of   --->
                                               <---  Ready, or Refused
      FleetState       every engine as it is   --->
      Update, Version, Quarantine, Readmit     --->        what changes from then on, in order
                                               <---  Acknowledged (of Update)
      Work             answers to make         --->
                                               <---  Told, then Made or Failed, for each answer
      Ping                                     --->
                                               <---  Pong

`Told` brings the engines' own records of an answer before the answer itself, so that the driver's audit compares what
is trained with what was recorded the moment an engine answered.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from miles_contracts import Trajectory
from miles_loop.fleet_view import FleetState
from miles_rollout.router.counts import RouterCounts


class Purpose(StrEnum):
    """What an answer is for."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message.

    Attributes:
        config: the run's configuration as plain data.
        renderer: name of the family's renderer, `auto` to recognise it.
        model: folder with the tokenizer.
        paths: where the driver imports from: the user's functions are found there.
        folder: the driver's folder, for what they name relative to it.
        lockstep: send requests in rounds (see `miles_loop.lockstep`).
    """

    config: dict[str, Any]
    renderer: str
    model: str
    paths: tuple[str, ...]
    folder: str
    lockstep: bool


class Update(msgspec.Struct, frozen=True, kw_only=True, tag="update"):
    """Weights begin or cease to change. A beginning is acknowledged under its number."""

    begins: bool
    number: int


class Version(msgspec.Struct, frozen=True, kw_only=True, tag="version"):
    """Engines must serve this version from now on."""

    version: int


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag="quarantine"):
    """This engine is out of service."""

    url: str
    reason: str


class Readmit(msgspec.Struct, frozen=True, kw_only=True, tag="readmit"):
    """This engine has the current weights and answers at `address`."""

    url: str
    address: str


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to make.

    Attributes:
        number: names it on this connection.
        purpose: what it is for.
        prompt_index: of the task.
        task: as msgpack; empty where the worker makes the same task itself, because it is more than plain data.
        member, attempt: identity of the answer; its seed follows from them.
    """

    number: int
    purpose: Purpose
    prompt_index: int
    task: bytes
    member: int
    attempt: int


class Work(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """All that changed in one moment of the driver.

    Attributes:
        issues: to make, in the order in which they were asked for.
        cancelled: numbers that nobody waits for any more.
        in_flight: answers that the driver waits for after this, by purpose.
    """

    issues: tuple[Issue, ...]
    cancelled: tuple[int, ...]
    in_flight: dict[Purpose, int]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Are you there?"""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Everything is loaded."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """It could not be loaded; `kind` is the error's class name."""

    kind: str
    message: str


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag="acknowledged"):
    """Every router here knows it."""

    number: int


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """Yes."""


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    """What happened in the worker since its last report.

    Attributes:
        records: engines' answers by request id (see `EngineRecords.take`).
        capture_s: seconds spent on recording routes.
        counts: of the router of training.
        serving: engines that take turns here.
        outstanding_tokens: of turns on their way.
        counted: by purpose, what the making of answers itself counts (an agent's sessions, say).
    """

    records: dict[str, list[Any]]
    capture_s: float
    counts: RouterCounts
    serving: int
    outstanding_tokens: int
    counted: dict[Purpose, dict[str, float]]


class Made(msgspec.Struct, frozen=True, kw_only=True, tag="made", eq=False):
    """An answer is there, failed or not."""

    number: int
    trajectories: tuple[Trajectory, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", eq=False):
    """Making it raised an error of this class."""

    number: int
    kind: str
    message: str


ToWorker = Start | FleetState | Update | Version | Quarantine | Readmit | Work | Ping
ToDriver = Ready | Refused | Acknowledged | Pong | Told | Made | Failed
