"""reasoning-gym's own verifiers as a reward."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, Task


class ReasoningGymReward:
    """The score in [0, 1] that the family of the task gives to the answer.

    The answer is what the last `<answer>` tag holds; without one it is the whole response, stripped.

    Args:
        require_tag: give 0.0 to a response without the tag.
    """

    def __init__(self, *, require_tag: bool = False) -> None:
        self._require_tag = require_tag

    def __call__(self, task: Task, response: str) -> float:
        from reasoning_gym.utils import extract_answer

        origin = task.metadata.get("reasoning_gym")
        if not isinstance(origin, dict) or not {"name", "config", "entry"} <= origin.keys():
            raise InvalidFieldError(
                "task.metadata.reasoning_gym", origin, "this reward scores tasks of ReasoningGymTasks only"
            )
        answer = extract_answer(response)
        if answer is None and not self._require_tag:
            answer = response.strip()
        config = msgspec.json.encode(origin["config"], order="sorted")
        return float(_verifier(origin["name"], config).score_answer(answer, origin["entry"]))


@lru_cache(maxsize=128)
def _verifier(name: str, config: bytes) -> Any:
    from reasoning_gym.factory import DATASETS

    dataset, config_type = DATASETS[name]
    # size and seed do not matter to a verifier; a small size keeps its construction cheap.
    return dataset(config=config_type(**msgspec.json.decode(config)))
