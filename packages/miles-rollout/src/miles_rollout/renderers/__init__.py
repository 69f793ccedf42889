"""One renderer for training data, rollout, evaluation and serving; append-only, and proven to be so.

renderer = load_renderer(Path("my-model"))
ids = renderer.render(messages, tools)                                  # first turn
ids += sampled                                                          # never encoded again
ids += renderer.render_suffix(messages_so_far, ids, appended, tools)    # next turn: only what is new
"""

from miles_rollout.renderers.detect import Detection
from miles_rollout.renderers.errors import CallOpeningError, RenderError, RenderRefusedError
from miles_rollout.renderers.forced import ForcedCall
from miles_rollout.renderers.load import FAMILIES, detect_family, load_renderer
from miles_rollout.renderers.protocol import Renderer, RenderOptions, Tools
from miles_rollout.renderers.vocabulary import Vocabulary

__all__ = [
    "FAMILIES",
    "CallOpeningError",
    "Detection",
    "ForcedCall",
    "RenderError",
    "RenderOptions",
    "RenderRefusedError",
    "Renderer",
    "Tools",
    "Vocabulary",
    "detect_family",
    "load_renderer",
]
