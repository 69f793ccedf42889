"""Another program takes an engine's port in the moment before the engine binds it: the run does not notice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipe_runs import SMALL, Shell, records, wait_for

MEET = '''
"""The first engine that starts says where it will listen, and waits until somebody else does."""
import os
import sys
import time

folder = os.environ.get("TEST_MEETING_PLACE")
if folder and "--model-path" in sys.orig_argv:
    try:
        os.mkdir(os.path.join(folder, "met"))
    except FileExistsError:
        pass
    else:
        with open(os.path.join(folder, "wanted.part"), "w") as wanted:
            wanted.write(sys.orig_argv[sys.orig_argv.index("--port") + 1])
        os.rename(os.path.join(folder, "wanted.part"), os.path.join(folder, "wanted"))
        while not os.path.exists(os.path.join(folder, "taken")):
            time.sleep(0.01)
'''


@contextmanager
def squatter(port: int) -> Iterator[None]:
    """Somebody else's server, which hangs up at once."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        over = threading.Event()

        def hang_up() -> None:
            while True:
                other, _ = server.accept()
                other.close()
                if over.is_set():
                    return

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield
        finally:
            over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


def test_a_stolen_port_does_not_fail_the_run(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MEET)
    shell.environment["TEST_MEETING_PLACE"] = str(tmp_path)
    run = tmp_path / "run"
    options = (
        "--engine.replicas",
        2,
        "--engine.restarts",
        0,
        "--runtime.share_imports",  # an interpreter of its own for each engine, which reads the file above
        "false",
        "--steps",
        2,
        "--evaluation.at_start",
        "false",
        "--evaluation.at_end",
        "false",
    )
    process = shell.start("miles-qwen3", "train", "--run-dir", run, *options, *SMALL)
    wait_for((tmp_path / "wanted").exists, process)
    port = int((tmp_path / "wanted").read_text())
    with squatter(port):
        (tmp_path / "taken").touch()
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    log = (run / "logs" / "driver.log").read_text()
    assert "another program listens on its port; it is started again elsewhere" in log
    assert f"from now on, not at http://127.0.0.1:{port}" in log
    steps = [r for r in records(run) if "train/loss" in r]
    assert len(steps) == 2
    assert all(r["router/engines_serving"] == 2 and r["rollout/token_mismatches"] == 0 for r in steps)
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
