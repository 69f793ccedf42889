from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import sys, time
start = time.process_time()
import miles_contracts, miles_contracts.wire
seconds = time.process_time() - start
import json
print(json.dumps({"seconds": seconds, "modules": sorted({m.split(".")[0] for m in sys.modules})}))
"""


def test_import_is_fast_and_light() -> None:
    """The promise of this package: under 0.3 s of processor time (best of five), nothing heavy."""
    runs = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(out))
    heavy = {"torch", "ray", "transformers", "pydantic", "aiohttp", "safetensors", "xxhash"}
    assert not heavy & set(runs[0]["modules"])
    assert min(r["seconds"] for r in runs) < 0.3
