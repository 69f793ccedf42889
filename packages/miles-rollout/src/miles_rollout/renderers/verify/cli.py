"""The command: `miles-session verify --model PATH [--family F]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_contracts import MilesError
from miles_rollout.renderers.base import DialectRenderer
from miles_rollout.renderers.load import FAMILIES, detect_family, load_renderer
from miles_rollout.renderers.protocol import RenderOptions
from miles_rollout.renderers.verify.checks import verify_renderer
from miles_rollout.renderers.verify.report import aligned


def run(argv: Sequence[str]) -> int:
    """Verifies a tokenizer folder and prints the table.

    Args:
        argv: the arguments behind the command's name.

    Returns:
        The exit status: 0 when the renderer is proven append-only, 1 when it is not, 2 when it cannot be loaded.
    """
    parser = argparse.ArgumentParser(prog="miles-session verify", description="Prove that a renderer is append-only.")
    parser.add_argument("--list", action="store_true", help="list the families and exit")
    parser.add_argument("--model", type=Path, metavar="PATH", help="model or tokenizer folder")
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), help="family of the renderer (default: found in the folder)"
    )
    parser.add_argument("--thinking", choices=("on", "off"), help="switch thinking (default: as the family does)")
    parser.add_argument("--reasoning-effort", metavar="LEVEL", help="level of reasoning (default: as the family does)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random conversations (default: 0)")
    parser.add_argument("--random", type=int, default=20, metavar="N", help="random conversations (default: 20)")
    arguments = parser.parse_args(argv)
    if arguments.list:
        sys.stdout.write(_family_table())
        return 0
    if arguments.model is None:
        parser.error("--model is needed: the folder of the model or tokenizer")
    thinking = None if arguments.thinking is None else arguments.thinking == "on"
    options = RenderOptions(thinking=thinking, reasoning_effort=arguments.reasoning_effort)
    try:
        family = arguments.family
        if family is None:
            detection = detect_family(arguments.model)
            sys.stdout.write(f"family: {detection}\n")
            family = detection.family
        renderer = load_renderer(arguments.model, family, options=options)
    except MilesError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = verify_renderer(renderer, seed=arguments.seed, random_count=arguments.random)
    sys.stdout.write(report.table())
    return 0 if report.ok else 1


def _family_table() -> str:
    rows: list[tuple[str, ...]] = [("family", "models", "compared with", "differs from the published template")]
    for name, family in FAMILIES.items():
        if issubclass(family, DialectRenderer):
            rows.append((name, family.models, family.checked or "nothing: unproven", family.deviation or "-"))
        else:
            rows.append((name, "any other", "-", "uses it, and refuses a turn when it rewrites history"))
    return "\n".join(aligned(rows)) + "\n"
