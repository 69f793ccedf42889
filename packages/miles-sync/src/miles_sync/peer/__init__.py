"""Peer-to-peer transport: every source rank writes into every target rank's memory exactly what it needs."""

from miles_sync.messages import PeerBucket, Written
from miles_sync.peer.memory import Arena, PeerBackend, PeerMemory, PeerWriter
from miles_sync.peer.receiver import PeerReceiver
from miles_sync.peer.sender import PeerSender, SourcesDifferError, merge

__all__ = [
    "Arena",
    "PeerBackend",
    "PeerBucket",
    "PeerMemory",
    "PeerReceiver",
    "PeerSender",
    "PeerWriter",
    "SourcesDifferError",
    "Written",
    "merge",
]
