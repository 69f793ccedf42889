"""A sender of weights in a process of its own, which a test kills as a trainer dies: between two instructions."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from miles_contracts import WeightManifest
from miles_loop.senders import make_sender
from miles_loop.trainer_link import SenderSettings

SPAWN = multiprocessing.get_context("spawn")


class SenderProcess:
    """A `WeightSender` that sends the checkpoint in `folder`, whatever tensors it is given."""

    def __init__(self, settings: SenderSettings, folder: Path) -> None:
        self._lock = threading.Lock()  # a bucket is acknowledged while the next one is filled
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, settings, folder), daemon=True)
        self._process.start()
        theirs.close()

    def connect(self, receivers: Sequence[str], specs: Any, split: bool, digests: bool = True) -> Any:
        return self._call("connect", receivers, specs, split, digests)

    def send(self, tensors: Iterable[Any], manifest: WeightManifest, update_id: str) -> Iterator[Any]:
        self._call("send", manifest, update_id)
        while (bucket := self._call("next")) is not None:
            yield bucket

    def acknowledge(self, update_id: str, index: int) -> None:
        self._call("acknowledge", update_id, index)

    def release(self, update_id: str) -> None:
        self._call("release", update_id)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self.kill()

    def _call(self, what: str, *args: Any) -> Any:
        with self._lock:
            self._pipe.send((what, args))
            return self._pipe.recv()


def _serve(pipe: Connection, settings: SenderSettings, folder: Path) -> None:
    sender = make_sender(settings)
    weights = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    buckets: Iterator[Any] = iter(())
    while True:
        what, args = pipe.recv()
        if what == "send":
            buckets = iter(sender.send(sorted(weights.items()), *args))
            pipe.send(None)
        elif what == "next":
            pipe.send(next(buckets, None))
        else:
            pipe.send(getattr(sender, what)(*args))
