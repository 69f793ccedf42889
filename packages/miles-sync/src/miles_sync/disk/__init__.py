"""Disk-delta transport: changed bytes through a shared folder or an object store.

Reading needs no torch; what publishes, and what serves tensors, is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_sync.disk.codec import Encoding
from miles_sync.disk.engine import DiskEngine
from miles_sync.disk.publication import Publication
from miles_sync.disk.store import FolderStore, Store
from miles_sync.disk.subscriber import DeltaSubscriber, PullReport
from miles_sync.messages import DiskBucket

if TYPE_CHECKING:
    from miles_sync.disk.publisher import DeltaPublisher, PublishReport
    from miles_sync.disk.transport import DiskReceiver, DiskSender

_WITH_TORCH = {
    "DeltaPublisher": "publisher",
    "DiskReceiver": "transport",
    "DiskSender": "transport",
    "PublishReport": "publisher",
}

__all__ = [
    "DeltaPublisher",
    "DeltaSubscriber",
    "DiskBucket",
    "DiskEngine",
    "DiskReceiver",
    "DiskSender",
    "Encoding",
    "FolderStore",
    "Publication",
    "PublishReport",
    "PullReport",
    "Store",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"miles_sync.disk.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'miles_sync.disk' has no attribute {name!r}")
