"""Problems of reasoning-gym with several attempts: what is wrong is said so, and the policy may try again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from miles_contracts import AgentResult, InvalidFieldError, SamplingParams, Task
from miles_rollout.environments.conversation import Conversation
from miles_rollout.rewards import ReasoningGymReward


class ReasoningGymEnvironment:
    """An agent for the tasks of `ReasoningGymTasks`.

    Args:
        attempts: answers of one episode.
        discount: what an answer is worth for every attempt before it: the reward is its score x discount^attempts.
        feedback: what is said to an answer that is not right; `{score}` is its score.

    Raises:
        InvalidFieldError: a value that cannot be.
    """

    def __init__(
        self, *, attempts: int = 3, discount: float = 0.8, feedback: str = "That is not right. Try again."
    ) -> None:
        if attempts < 1:
            raise InvalidFieldError("attempts", attempts, "use a value >= 1")
        if not 0.0 < discount <= 1.0:
            raise InvalidFieldError("discount", discount, "use a value above 0 and at most 1")
        try:
            feedback.format(score=0.0)
        except (KeyError, IndexError, ValueError) as error:
            raise InvalidFieldError("feedback", feedback, "only {score} is filled in") from error
        self._attempts = attempts
        self._discount = discount
        self._feedback = feedback
        self._score = ReasoningGymReward()

    async def agent(
        self, base_url: str, task: Task, params: SamplingParams, metadata: Mapping[str, Any]
    ) -> AgentResult:
        """One episode: a `miles_contracts.Agent`. The best of the discounted scores is the reward.

        Raises:
            EnvironmentFailedError: no answer from the policy.
            InvalidFieldError: the task is none of reasoning-gym.
        """
        best = 0.0
        async with Conversation(base_url, task.messages, params, metadata) as talk:
            while True:
                answer = await talk.answer()
                # A family's verifier may compute for a while, and other episodes go on meanwhile.
                score = await asyncio.to_thread(self._score, task, answer)
                best = max(best, score * self._discount ** (talk.turns - 1))
                if score >= 1.0 or talk.cut or talk.turns >= self._attempts:
                    break
                talk.say(self._feedback.format(score=score))
        return AgentResult(
            reward=best,
            metrics={"environment_turns": float(talk.turns), "last_score": score},
            metadata={"environment": f"reasoning_gym:{task.source}", "solved": score >= 1.0},
        )
