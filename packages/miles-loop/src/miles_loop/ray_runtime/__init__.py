"""Processes of a run on a Ray cluster: one supervising actor each, placed by one placement group.

    driver (asyncio)                         node A                         node B
    loop, worker, router,      actor calls   Supervisor                     Supervisor
    session server  ----------------------->   `- trainer process             `- engine process
         |  ^------------ TCP, wire frames ---------'  weights (transport)        ^
         `--------------------- HTTP, token ids ----------------------------------'

Ray decides where a process runs, starts its supervisor there and tells when a node is lost. Everything else is what
it is on one machine: the same specifications, the same messages, the same fleet that brings engines back. Neither
trajectories nor weights pass through Ray's object store.

`host` is where it starts; it is imported only when `runtime.kind` is `ray`.
"""

import os

# Read when Ray is imported. Under `uv run` its hook would build the environment anew for every worker, which hangs;
# workers use what is installed on their node.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# A cluster that a run starts for itself reports to nobody.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
