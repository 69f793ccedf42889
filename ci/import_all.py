"""Imports every module of an installed package: `python ci/import_all.py miles_rollout`.

A module whose dependency belongs to an extra is allowed to miss it, but only with an ImportError that names
a distribution the package declares in one of its extras.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib.metadata import requires


def extra_names(package: str) -> set[str]:
    """Import names that the extras of the installed `package` may bring."""
    lines = [line for line in requires(package.replace("_", "-")) or [] if "extra ==" in line]
    return {re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0].replace("-", "_") for line in lines}


def main(package: str) -> int:
    """Import all; print and count the modules that could not be."""
    allowed = extra_names(package)
    faults = 0
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in allowed:
                print(f"{module.name}: {error}")
                faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
