"""Moves weights: canonical names, buckets, transports and the update transaction.

Importing this package needs no torch; the transports (which do) are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_sync.buckets import DEFAULT_BUCKET_BYTES, Bucket, Piece, is_expert, plan_buckets
from miles_sync.canary import Expect, LogprobCanary
from miles_sync.report import UpdateReport
from miles_sync.transaction import Answer, Decision, Fault, Phase, Transaction
from miles_sync.update import Canary, FleetFencedError, UpdateSource, update_weights

if TYPE_CHECKING:
    from miles_sync.local import LocalReceiver, LocalSender, MappedBucket

_WITH_TORCH = {"LocalReceiver": "local", "LocalSender": "local", "MappedBucket": "local"}

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Answer",
    "Bucket",
    "Canary",
    "Decision",
    "Expect",
    "Fault",
    "FleetFencedError",
    "LocalReceiver",
    "LocalSender",
    "LogprobCanary",
    "MappedBucket",
    "Phase",
    "Piece",
    "Transaction",
    "UpdateReport",
    "UpdateSource",
    "is_expert",
    "plan_buckets",
    "update_weights",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"miles_sync.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'miles_sync' has no attribute {name!r}")
