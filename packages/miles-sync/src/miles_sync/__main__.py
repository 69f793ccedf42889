"""`python -m miles_sync plan`: bytes per rank and predicted times of an update, per transport."""

from __future__ import annotations

import argparse
import sys

from miles_contracts import InvalidFieldError
from miles_sync.models import ARCHITECTURES
from miles_sync.planner import PUBLISHED, Links, Parallel, report


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 when the arguments make no sense."""
    parser = argparse.ArgumentParser(prog="python -m miles_sync")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what an update of a large model costs on paper")
    plan.add_argument("model", choices=[*ARCHITECTURES, "all"])
    plan.add_argument("--trainer", help="like tp8,pp8,ep32,replicas4 (default: the published layout)")
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
        for model in ARCHITECTURES if options.model == "all" else [options.model]:
            known = PUBLISHED[model]
            trainer = Parallel.parse(options.trainer) if options.trainer else known.trainer
            engine = Parallel.parse(options.engine) if options.engine else known.engine
            engines = options.engines if options.engines is not None else known.engines
            sys.stdout.write(report(model, trainer, engine, engines, speeds) + "\n\n")
    except InvalidFieldError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
