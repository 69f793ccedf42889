"""An embedded engine that other processes may write weights into: `miles-engine` with the peers of miles-sync.

`python -m miles_loop.engine_process OPTIONS` takes the options of `miles-engine`.
"""

from __future__ import annotations

import sys

from miles_rollout.engine.cli import main
from miles_sync.peer.engine import peer_factories

if __name__ == "__main__":
    sys.exit(main(groups=peer_factories()))
