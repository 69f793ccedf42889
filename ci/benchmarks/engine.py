"""Speed of the embedded engine over HTTP against `model.generate`, same model, same prompts, one thread each.

    python ci/benchmarks/engine.py [--repeats 3] [--prompt 64] [--new 128]

Prints one table: tokens per second and the ratio of medians at 1, 16 and 64 sequences; then how long a batch of
ragged lengths takes whose requests arrive late, against the same requests all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_contracts import SamplingParams
from miles_rollout.engine_client import EngineClient

CONCURRENCY = (1, 16, 64)
READY = "miles-engine ready: "


def make_model(folder: Path) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.19 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts, different in every repetition so that no prefix cache helps."""
    generator = np.random.default_rng(seed)
    return [[int(i) for i in row] for row in generator.integers(2, 1024, size=(count, length))]


def time_generate(model: Qwen3ForCausalLM, batch: list[list[int]], new: int) -> float:
    """Seconds of `model.generate` with sampling and scores."""
    ids = torch.tensor(batch)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            top_k=0,
        )
    return time.perf_counter() - began


async def time_engine(client: EngineClient, batch: list[list[int]], new: int) -> float:
    """Seconds of one request a prompt, all at once, with log-probs."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    results = await asyncio.gather(*(client.generate(prompt, params) for prompt in batch))
    spent = time.perf_counter() - began
    assert all(len(r.output_ids) == new for r in results)
    return spent


def start_engine(
    folder: Path, *options: str, module: str = "miles_rollout.engine"
) -> tuple[subprocess.Popen[str], str, float]:
    """The process, its URL and the seconds until it was ready."""
    command = [sys.executable, "-m", module, "--model-path", str(folder), "--port", "0", *options]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--end-with-parent"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(READY):
        raise RuntimeError(f"the engine did not start: {line!r}")
    return process, line.removeprefix(READY).split()[0], time.perf_counter() - began


async def compare(url: str, model: Qwen3ForCausalLM, repeats: int, length: int, new: int) -> None:
    """Alternate the two, so that both see the same machine."""
    print(f"{'sequences':>10} {'engine tok/s':>14} {'generate tok/s':>15} {'ratio':>7}")
    async with EngineClient(url) as client:
        await time_engine(client, prompts(4, length, 10_000), 8)
        time_generate(model, prompts(4, length, 10_000), 8)
        for count in CONCURRENCY:
            ours, theirs = [], []
            for repeat in range(repeats):
                batch = prompts(count, length, 100 * count + repeat)
                ours.append(await time_engine(client, batch, new))
                theirs.append(time_generate(model, batch, new))
            a, b = count * new / statistics.median(ours), count * new / statistics.median(theirs)
            print(f"{count:>10} {a:>14,.0f} {b:>15,.0f} {a / b:>7.2f}")
        await ragged(client, repeats)


async def ragged(client: EngineClient, repeats: int) -> None:
    """64 requests of 16 .. 256 new tokens: all at once, and in four waves while the others run."""
    generator = np.random.default_rng(7)
    lengths = generator.integers(16, 257, size=64).tolist()
    sizes = generator.integers(8, 129, size=64).tolist()

    async def one(prompt: list[int], new: int, delay: float) -> float:
        await asyncio.sleep(delay)
        began = time.perf_counter()
        await client.generate(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))
        return time.perf_counter() - began

    for name, wave in (("all at once", 0.0), ("four waves, 0.1 s apart", 0.1)):
        spent, slowest = [], []
        for repeat in range(repeats):
            batch = [prompts(1, size, 5_000 + 64 * repeat + i)[0] for i, size in enumerate(sizes)]
            began = time.perf_counter()
            waits = await asyncio.gather(
                *(one(p, n, wave * (i % 4)) for i, (p, n) in enumerate(zip(batch, lengths, strict=True)))
            )
            spent.append(time.perf_counter() - began)
            slowest.append(max(w / n for w, n in zip(waits, lengths, strict=True)))
        total = statistics.median(spent)
        per_token = statistics.median(slowest) * 1000
        print(f"ragged, {name}: {sum(lengths) / total:,.0f} tok/s, slowest request {per_token:.1f} ms a token")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = make_model(folder)
        process, url, started = start_engine(folder)
        try:
            print(f"engine ready after {started:.1f} s; {sum(p.numel() for p in model.parameters()):,} parameters")
            asyncio.run(compare(url, model, options.repeats, options.prompt, options.new))
        finally:
            process.terminate()
            process.wait(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
