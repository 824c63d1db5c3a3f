"""A counting game served by OpenEnv's own package: `python openenv_server.py PORT`."""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import create_app  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.interfaces import (  # pyright: ignore[reportMissingImports]
    Environment,
)
from openenv.core.env_server.types import (  # pyright: ignore[reportMissingImports]
    Action,
    Observation,
    State,
)


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Counting(Environment):
    """Double the number that is shown, twice."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self._number, self._left = random.Random(seed).randint(10, 9999), 2
        return Hint(text=f"double {self._number}")

    def step(self, action, timeout_s=None, **_):
        if action.number == -1:
            raise ValueError("no such number")
        is_right = action.number == 2 * self._number
        self._number, self._left = 2 * self._number, self._left - 1
        return Hint(text=f"double {self._number}", reward=is_right / 2, done=self._left == 0)

    @property
    def state(self):
        return State(episode_id="e", step_count=2 - self._left)


if __name__ == "__main__":
    app = create_app(Counting, Guess, Hint, env_name="counting", max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
