"""`python -m miles_sync plan`: bytes per rank and predicted times of an update, per transport."""

from __future__ import annotations

import argparse
import sys

from miles_contracts import InvalidFieldError
from miles_sync.models import find_model, known_models
from miles_sync.planner import PUBLISHED, Links, Parallel, report


def _layouts(model: str, options: argparse.Namespace) -> tuple[Parallel, Parallel, int]:
    """Trainer, engine and number of engines: as asked for, else those that a time was published for.

    Raises:
        InvalidFieldError: neither, or nonsense.
    """
    known = PUBLISHED.get(model)
    for option in ("trainer", "engine", "engines"):
        if known is None and getattr(options, option) is None:
            raise InvalidFieldError(option, None, f"no time is published for {model}: give --{option}")
    trainer = Parallel.parse(options.trainer) if options.trainer is not None or known is None else known.trainer
    engine = Parallel.parse(options.engine) if options.engine is not None or known is None else known.engine
    return trainer, engine, options.engines if options.engines is not None or known is None else known.engines


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 when the arguments make no sense."""
    parser = argparse.ArgumentParser(prog="python -m miles_sync")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what an update of a large model costs on paper")
    plan.add_argument(
        "model",
        help=f"{', '.join(known_models())}, a folder with a config.json, or 'all' with a published time",
    )
    plan.add_argument("--trainer", help="like tp8,pp8,ep32,replicas4 (default: that of the published time)")
    plan.add_argument("--engine", help="like tp32,ep32")
    plan.add_argument("--engines", type=int, help="how many engines of that layout")
    links = Links()
    plan.add_argument("--network", type=float, default=links.network, help="GB/s of a rank's port (%(default)s)")
    plan.add_argument("--copy", type=float, default=links.copy, help="GB/s of a local copy (%(default)s)")
    plan.add_argument("--shared-disk", type=float, default=links.shared_disk, help="GB/s a host reads (%(default)s)")
    plan.add_argument("--local-disk", type=float, default=links.local_disk, help="GB/s a host writes (%(default)s)")
    plan.add_argument("--changed", type=float, default=links.changed, help="size of a delta / model (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        speeds = Links(
            network=options.network,
            copy=options.copy,
            shared_disk=options.shared_disk,
            local_disk=options.local_disk,
            changed=options.changed,
        )
        for name in PUBLISHED if options.model == "all" else [options.model]:
            model = find_model(name)
            trainer, engine, engines = _layouts(model.name, options)
            sys.stdout.write(report(model, trainer, engine, engines, speeds) + "\n\n")
    except InvalidFieldError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
