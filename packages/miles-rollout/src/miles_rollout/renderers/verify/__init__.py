"""Proves that a renderer is append-only on a suite of conversations: `miles-session verify --model PATH`.

Needs a tokenizer folder only; no engine, no torch.
"""

from miles_rollout.renderers.verify.checks import verify_renderer
from miles_rollout.renderers.verify.cli import run
from miles_rollout.renderers.verify.conversations import Conversation, random_conversations, standard_conversations
from miles_rollout.renderers.verify.report import Finding, Outcome, Report

__all__ = [
    "Conversation",
    "Finding",
    "Outcome",
    "Report",
    "random_conversations",
    "run",
    "standard_conversations",
    "verify_renderer",
]
