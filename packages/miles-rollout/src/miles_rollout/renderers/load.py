"""From a model folder to its renderer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from miles_contracts import InvalidFieldError
from miles_rollout.renderers.base import DialectRenderer
from miles_rollout.renderers.detect import Detection, detect
from miles_rollout.renderers.families.chatml import ChatMLRenderer, SmolLM2Renderer
from miles_rollout.renderers.families.deepseek import DeepSeekV4Renderer, DeepSeekV32Renderer
from miles_rollout.renderers.families.gemma4 import Gemma4Renderer
from miles_rollout.renderers.families.glm import Glm45Renderer, GlmRenderer
from miles_rollout.renderers.families.harmony import HarmonyRenderer
from miles_rollout.renderers.families.inkling import InklingRenderer
from miles_rollout.renderers.families.kimi import Kimi25Renderer, KimiK2Renderer
from miles_rollout.renderers.families.minimax import MiniMaxRenderer
from miles_rollout.renderers.families.nemotron import NemotronRenderer
from miles_rollout.renderers.families.qwen3 import Qwen3NextRenderer, Qwen3Renderer, Qwen35Renderer
from miles_rollout.renderers.families.template import TemplateRenderer
from miles_rollout.renderers.folder import read_folder
from miles_rollout.renderers.protocol import Renderer, RenderOptions

_DIALECTS: tuple[type[DialectRenderer], ...] = (
    ChatMLRenderer,
    SmolLM2Renderer,
    Qwen3Renderer,
    Qwen3NextRenderer,
    Qwen35Renderer,
    GlmRenderer,
    Glm45Renderer,
    DeepSeekV32Renderer,
    DeepSeekV4Renderer,
    Kimi25Renderer,
    KimiK2Renderer,
    NemotronRenderer,
    MiniMaxRenderer,
    HarmonyRenderer,
    Gemma4Renderer,
    InklingRenderer,
)
FAMILIES: Mapping[str, type[DialectRenderer] | type[TemplateRenderer]] = MappingProxyType(
    {d.name: d for d in _DIALECTS} | {TemplateRenderer.name: TemplateRenderer}
)


def load_renderer(model_path: Path, family: str | None = None, *, options: RenderOptions | None = None) -> Renderer:
    """The renderer of a model or tokenizer folder.

    Args:
        model_path: a folder with tokenizer.json; tokenizer_config.json, chat_template.jinja, config.json and
            generation_config.json are read when they are there.
        family: a name from `FAMILIES`; found from the folder when None (`detect_family` says why).
        options: what a conversation may choose, see `RenderOptions`.

    Raises:
        InvalidFieldError: unknown family, a folder that is not a tokenizer, or a tokenizer that is not of the family.
    """
    folder = read_folder(Path(model_path))
    if family is None:
        family = detect(folder, FAMILIES).family
    if family not in FAMILIES:
        raise InvalidFieldError("family", family, f"must be one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[family](folder, options or RenderOptions())


def detect_family(model_path: Path) -> Detection:
    """Which family a folder belongs to, and why.

    Raises:
        InvalidFieldError: the folder is not a tokenizer.
    """
    return detect(read_folder(Path(model_path)), FAMILIES)
