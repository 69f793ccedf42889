"""The conformance suite as a command: one line a check, status 1 when a promise is broken."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from miles_contracts import MilesError
from miles_rollout.engine.conformance import CHECKS, run_checks


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a check."""
    parser = argparse.ArgumentParser(prog="python -m miles_rollout.engine.conformance", description=__doc__)
    parser.add_argument("url", help="the engine, for example http://127.0.0.1:30000")
    folders = "two folders of the engine's model with different weights; without them no weights are updated"
    parser.add_argument("--weights", type=Path, nargs=2, metavar="FOLDER", help=folders)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the engine's model, for its number of experts")
    options = parser.parse_args(argv)
    weights: tuple[Path, Path] | None = None
    if options.weights is not None:
        weights = (options.weights[0].resolve(), options.weights[1].resolve())
    sizes = model_sizes(options.model) if options.model is not None else {}
    try:
        outcomes = asyncio.run(run_checks(options.url, CHECKS, weights=weights, **sizes))
    except MilesError as error:
        print(error, file=sys.stderr)  # noqa: T201 (a command)
        return 2
    for outcome in outcomes:
        broken = f"FAILED: {outcome.failure}" if outcome.failure else None
        skipped = f"skipped: {outcome.skipped}" if outcome.skipped else None
        print(f"{outcome.name}: {broken or skipped or 'ok'}")  # noqa: T201
    return 1 if any(o.failure for o in outcomes) else 0


def model_sizes(folder: Path) -> dict[str, int]:
    """`experts`, `top_k` and `layers` of a mixture-of-experts model; nothing for a dense one."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    experts = next((config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(k)), None)
    if experts is None:
        return {}
    return {"experts": experts, "top_k": config["num_experts_per_tok"], "layers": config["num_hidden_layers"]}


if __name__ == "__main__":
    sys.exit(main())
