"""An OpenEnv server: guess a number between 1 and 9 that the seed decides. Its argument is the port."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    text: str = ""


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._number = kwargs.get("number") or random.Random(seed).randint(1, 9)
        self._state = State(step_count=0)
        return Hint(text="Guess a number between 1 and 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        if action.message == "crash":
            raise RuntimeError("the table fell over")
        if action.message == "give up":
            return Hint(text="", done=True)
        if not action.message.isdigit():
            return Hint(text="That is no number.", reward=-0.5)
        guess = int(action.message)
        if guess == self._number:
            return Hint(text="Right.", reward=1.0, done=True)
        return Hint(text="Higher." if guess < self._number else "Lower.", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
