"""Which family a model folder belongs to, and why."""

from __future__ import annotations

from dataclasses import dataclass

from miles_rollout.renderers.folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The family found for a folder.

    Attributes:
        family: its name.
        evidence: what pointed to it, for people.
    """

    family: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.family} ({'; '.join(self.evidence)})"


def detect_family(folder: ModelFolder) -> Detection:
    """Finds the family from the model type, the tokens and the chat template; "default" when nothing is known."""
    template = folder.chat_template or ""
    tokens = folder.vocabulary.added
    if {"<|im_start|>", "<|im_end|>"} <= tokens.keys():
        if folder.model_type in ("qwen3", "qwen3_moe") or "<think>" in template:
            return Detection(family="qwen3", evidence=("ChatML tokens", "reasoning tags in the template"))
        return Detection(family="chatml", evidence=("ChatML tokens",))
    return Detection(family="default", evidence=("no known family; its chat template is checked at every turn",))
