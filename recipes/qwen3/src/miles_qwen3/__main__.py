"""`python -m miles_qwen3` is the command `miles-qwen3`."""

import sys

from miles_qwen3.cli import main

sys.exit(main())
