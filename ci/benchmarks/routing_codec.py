"""The packed form of routing traces against copying memory: pack, unpack, a whole frame, and what other forms cost.

python ci/benchmarks/routing_codec.py [--tokens 32000] [--layers 60] [--top-k 8] [--rounds 9]

Ratios are medians of rounds in which everything runs in turn; `memcpy` copies the trace as it is in memory into
memory that is there already, `fresh_copy` into new memory, as a decoder has to.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
import zlib
from collections.abc import Callable

import numpy as np

from miles_contracts import RoutingTrace, row_digests, wire


def measure(trace: RoutingTrace, rounds: int) -> dict[str, float]:
    """Sizes in bytes and times in milliseconds of one trace, and the ratios to memcpy."""
    ids = trace.expert_ids
    there = np.empty_like(ids)
    words = trace.pack()
    frame = wire.encode(trace)
    shape = ids.shape
    jobs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(there, ids),
        "fresh_copy": lambda: ids.copy(),
        "pack": trace.pack,
        "unpack": lambda: RoutingTrace.unpack(words, shape, trace.num_experts),
        "frame_encode": lambda: wire.encode(trace),
        "frame_decode": lambda: wire.decode(frame, RoutingTrace),
        "crc32": lambda: zlib.crc32(words.view(np.uint8).data),
        "row_digests": lambda: row_digests(ids),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            times[name].append(1e3 * (time.perf_counter() - began))
    ms = {name: statistics.median(v) for name, v in times.items()}
    ratios = {
        f"{name}_to_memcpy": statistics.median(a / b for a, b in zip(times[name], times["memcpy"], strict=True))
        for name in ("pack", "unpack", "frame_encode", "frame_decode")
    }
    return {
        "bits": trace.bits,
        "memory_bytes": trace.num_bytes,
        "wire_bytes": len(frame),
        **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
        **{name: round(value, 2) for name, value in ratios.items()},
    }


def other_forms(trace: RoutingTrace) -> dict[str, float]:
    """What the same trace costs in the forms that we do not use; one round, to compare orders."""
    raw = trace.expert_ids.astype("<i4").tobytes()
    began = time.perf_counter()
    text = json.dumps(base64.b64encode(raw).decode())
    base64.b64decode(json.loads(text))
    base64_ms = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    squeezed = zlib.compress(trace.pack().tobytes(), 1)
    zlib_ms = 1e3 * (time.perf_counter() - began)
    return {
        "int32_bytes": len(raw),
        "json_base64_bytes": len(text),
        "json_base64_there_and_back_ms": round(base64_ms, 1),
        "zlib_1_bytes": len(squeezed),
        "zlib_1_compress_ms": round(zlib_ms, 1),
    }


def make_trace(tokens: int, layers: int, top_k: int, experts: int, skew: float) -> RoutingTrace:
    """Distinct experts for each token; `skew` > 0 makes some popular, each layer others, as real routers do."""
    rng = np.random.default_rng(0)
    ids = np.empty((tokens - 1, layers, top_k), dtype=np.int64)
    for layer in range(layers):
        popularity = skew * rng.standard_normal(experts)
        scores = popularity + rng.gumbel(size=(tokens - 1, experts)).astype(np.float32)
        ids[:, layer] = np.argpartition(-scores, top_k, axis=-1)[:, :top_k]
    return RoutingTrace.of(ids, experts)


def main() -> None:
    """Print one JSON object: a record for each number of experts, and the other forms for 256."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    shape = (options.tokens - 1, options.layers, options.top_k)
    found: dict[str, object] = {}
    for experts in (32, 64, 128, 256, 384, 512):
        ids = np.random.default_rng(0).integers(0, experts, shape)
        found[f"{experts} experts"] = measure(RoutingTrace.of(ids, experts), options.rounds)
    for skew in (0.0, 0.5):
        trace = make_trace(options.tokens, options.layers, options.top_k, 256, skew)
        found[f"other forms, 256 experts, skew {skew}"] = other_forms(trace)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
