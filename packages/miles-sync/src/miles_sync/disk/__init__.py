"""Disk-delta transport: changed bytes through a shared folder or an object store."""

from miles_sync.disk.codec import Encoding
from miles_sync.disk.publication import Publication
from miles_sync.disk.publisher import DeltaPublisher, PublishReport
from miles_sync.disk.store import FolderStore, Store
from miles_sync.disk.subscriber import DeltaSubscriber, PullReport
from miles_sync.disk.transport import DiskEngine, DiskReceiver, DiskSender
from miles_sync.messages import DiskBucket

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
