"""Which family a model folder belongs to, and why.

Control tokens give a family away; where several share their tokens (ChatML) the model type and the chat template
decide. What was found is then checked: a family must render short conversations as the folder's own template does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_contracts import Message, MilesError
from miles_rollout.renderers.folder import ModelFolder
from miles_rollout.renderers.protocol import Renderer, RenderOptions

Maker = Callable[[ModelFolder, RenderOptions], Renderer]

_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "X"}},
            "required": ["x"],
        },
    },
}
_USER = Message(role="user", content="question")
_SYSTEM = Message(role="system", content="instructions")
_PROBES: Mapping[str, tuple[list[Message], list[Mapping[str, Any]]]] = {
    "a question": ([_USER], []),
    "a system message": ([_SYSTEM, _USER], []),
    "tools": ([_SYSTEM, _USER], [_TOOL]),
}


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The family found for a folder.

    Attributes:
        family: its name.
        evidence: what pointed to it, for people.
        disagreements: probes on which the family differs from the folder's chat template.
    """

    family: str
    evidence: tuple[str, ...]
    disagreements: tuple[str, ...] = ()

    def __str__(self) -> str:
        differs = f"; differs from the chat template on {', '.join(self.disagreements)}" if self.disagreements else ""
        return f"{self.family} ({'; '.join(self.evidence)}{differs})"


def detect(folder: ModelFolder, families: Mapping[str, Maker]) -> Detection:
    """Finds the family of a folder; "default" when none is known.

    Args:
        folder: the model folder.
        families: makes a renderer by family name.
    """
    family, evidence = _guess(folder)
    if family == "default" or folder.chat_template is None:
        return Detection(family=family, evidence=evidence)
    differs = _disagreements(folder, families[family], families["default"])
    if differs and "<|im_start|>" in folder.vocabulary.added:
        # Many models share these tokens and nothing else; only the family's own form makes one a member.
        reason = f"ChatML tokens, but the chat template differs from the family {family} on {', '.join(differs)}"
        return Detection(family="default", evidence=(reason,))
    if not differs:
        evidence = (*evidence, "agrees with the chat template on all probes")
    return Detection(family=family, evidence=evidence, disagreements=differs)


def _disagreements(folder: ModelFolder, candidate: Maker, template: Maker) -> tuple[str, ...]:
    options = RenderOptions()
    try:
        ours, theirs = candidate(folder, options), template(folder, options)
    except MilesError as error:
        return (str(error),)
    out = []
    for name, (messages, tools) in _PROBES.items():
        try:
            expected = theirs.render(messages, tools)
            silent = bool(tools) and expected == theirs.render(messages)
        except MilesError:
            continue  # the template has no form for this probe
        if not silent and ours.render(messages, tools) != expected:
            out.append(name)
    return tuple(out)


def _guess(folder: ModelFolder) -> tuple[str, tuple[str, ...]]:
    tokens = folder.vocabulary.added
    for token, family in (
        ("<|content_model_end_sampling|>", "inkling"),
        ("<|turn>", "gemma4"),
        ("]~b]", "minimax_m2"),
    ):
        if token in tokens:
            return family, (f"token {token}",)
    if {"<|start|>", "<|channel|>", "<|call|>"} <= tokens.keys():
        return "gpt_oss", ("tokens <|start|>, <|channel|>, <|call|>",)
    if "<|im_middle|>" in tokens:
        return _guess_kimi(folder)
    if "<｜User｜>" in tokens:
        return _guess_deepseek(folder)
    if {"[gMASK]", "<sop>", "<|observation|>"} <= tokens.keys():
        return _guess_glm(folder)
    if {"<|im_start|>", "<|im_end|>"} <= tokens.keys():
        return _guess_chatml(folder)
    return "default", ("no known control tokens; its chat template is checked at every turn",)


def _guess_kimi(folder: ModelFolder) -> tuple[str, tuple[str, ...]]:
    if folder.model_type == "kimi_k25" or "tools_ts_str" in (folder.chat_template or ""):
        return "kimi_k2_5", ("token <|im_middle|>", "tools as TypeScript")
    return "kimi_k2", ("token <|im_middle|>",)


def _guess_deepseek(folder: ModelFolder) -> tuple[str, tuple[str, ...]]:
    for kind, family in (("deepseek_v32", "deepseek_v3_2"), ("deepseek_v4", "deepseek_v4")):
        if folder.model_type == kind:
            return family, (f"model type {kind}",)
    if folder.chat_template is None and "｜DSML｜" in folder.vocabulary.added:
        return "deepseek_v4", ("token ｜DSML｜, no model type: the newest is assumed",)
    return "default", ("an older DeepSeek model; its chat template is checked at every turn",)


def _guess_glm(folder: ModelFolder) -> tuple[str, tuple[str, ...]]:
    template = folder.chat_template or ""
    if "/nothink" in template:
        return "glm4_5", ("GLM tokens", "/nothink in the chat template")
    if "<think>" in template or (not template and "<think>" in folder.vocabulary.added):
        return "glm", ("GLM tokens", "reasoning tags")
    return "default", ("an older GLM model; its chat template is checked at every turn",)


def _guess_chatml(folder: ModelFolder) -> tuple[str, tuple[str, ...]]:
    template = folder.chat_template
    if template is None:
        if folder.model_type.startswith(("qwen3_5", "qwen3_next")):
            family = "qwen3_5" if folder.model_type.startswith("qwen3_5") else "qwen3_next"
            return family, ("ChatML tokens", f"model type {folder.model_type}")
        if "<think>" in folder.vocabulary.added:
            return "qwen3", ("ChatML tokens", "token <think>")
        return "chatml", ("ChatML tokens",)
    if "truncate_history_thinking" in template:
        return "nemotron3", ("ChatML tokens", "truncate_history_thinking in the chat template")
    if "named SmolLM" in template:
        return "smollm2", ("ChatML tokens", "SmolLM in the chat template")
    if "<think>" not in template:
        return "chatml", ("ChatML tokens",)
    if "<function=" in template:
        return "qwen3_5", ("ChatML tokens", "reasoning tags", "calls as XML")
    if "enable_thinking" in template:
        return "qwen3", ("ChatML tokens", "reasoning that can be switched off")
    return "qwen3_next", ("ChatML tokens", "reasoning that is always on")
