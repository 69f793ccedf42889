"""A Ray cluster of two nodes on one machine, and who works for a run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

HEAD = {"head": 1}
"""A resource that only the head node has: `--runtime.ray.trainer_resources.head 1` puts the trainer there."""
_NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class TwoNodes:
    """A head node and another one; either may hold anything that does not ask for `head`."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "resources": HEAD})
        self._other: Any = None
        self.make_whole()

    @property
    def address(self) -> str:
        """What `--address` takes."""
        return str(self._cluster.address)

    @property
    def options(self) -> tuple[object, ...]:
        """A run on this cluster: the trainer on the head node, the first engine on the other one."""
        where = ("--runtime.ray.placement", "spread", "--runtime.ray.trainer_resources.head", 1)
        return ("--runtime", "ray", "--address", self.address, *where)

    def make_whole(self) -> None:
        """Add the second node when it is not there."""
        if self._other is None:
            self._other = self._cluster.add_node(**_NODE)
            self._cluster.wait_for_nodes()

    def lose_other(self) -> None:
        """Kill the second node as a power cut would."""
        self._cluster.remove_node(self._other, allow_graceful=False)
        self._other = None

    def close(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def working_for(log: Path) -> list[int]:
    """Processes that write to a log: one of a run's processes, with its guard."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # Standard output of a run's process, and of nobody else.
                if os.readlink(entry / "fd" / "1") == str(log):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def leader(log: Path) -> int:
    """The process that writes to a log, without its guard."""
    return next(pid for pid in working_for(log) if os.getpgid(pid) == pid)


def actor_of(log: Path) -> int:
    """The actor that supervises the process of a log."""
    parent = int(_stat(leader(log))[1])
    assert b"ray::Supervisor" in Path(f"/proc/{parent}/cmdline").read_bytes()
    return parent


def raylet_of(log: Path) -> str:
    """What tells the node of the process of a log from the other node."""
    environment = Path(f"/proc/{leader(log)}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(b"RAY_RAYLET_PID=")).decode()


def gone(run: Path) -> bool:
    """Whether nothing works for a run any more."""
    return not any(working_for(log) for log in (run / "logs").glob("*.log"))


def eventually(condition: Callable[[], object]) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
