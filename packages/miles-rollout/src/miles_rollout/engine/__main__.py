"""`python -m miles_rollout.engine` is `miles-engine`."""

import sys

from miles_rollout.engine.cli import main

sys.exit(main())
