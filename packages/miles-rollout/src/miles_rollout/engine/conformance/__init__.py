"""What Miles relies on in an engine, as checks that run against any URL: the embedded engine or SGLang.

    python -m miles_rollout.engine.conformance http://127.0.0.1:30000

Each check is one promise of the HTTP boundary. Where an engine is known not to keep one, the check says why and is
skipped for it: these reasons are the list of known differences.
"""

from miles_rollout.engine.conformance import control, routing, sampling, weights
from miles_rollout.engine.conformance.suite import Check, Outcome, Subject, run_check, run_checks

CHECKS: tuple[Check, ...] = (*sampling.CHECKS, *control.CHECKS, *routing.CHECKS, *weights.CHECKS)

__all__ = ["CHECKS", "Check", "Outcome", "Subject", "run_check", "run_checks"]
