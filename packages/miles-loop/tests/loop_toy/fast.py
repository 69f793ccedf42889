"""The toy recipe with engine and trainer processes that have no model: `python -m loop_toy.fast train`."""

from __future__ import annotations

import dataclasses
import sys

from loop_toy import recipe
from miles_loop import runtime

_engine_spec, _trainer_spec = runtime.engine_spec, runtime.trainer_spec
runtime.engine_spec = lambda *args: dataclasses.replace(_engine_spec(*args), module="loop_toy.engine")
runtime.trainer_spec = lambda *args: dataclasses.replace(_trainer_spec(*args), module="loop_toy.trainer")

if __name__ == "__main__":
    sys.exit(recipe.main())
