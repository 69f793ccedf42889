from __future__ import annotations

import sys
from pathlib import Path

# The helpers beside the tests are imported by name; `importlib` mode does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
