"""An episode in the terminal, of environments that are still being written."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import pytest
from rich.console import Console

from moored.cli.episode import play_episode
from moored.envs.base import StepResult
from moored.errors import EnvError
from moored.types import Message

NOTHING: Any = None
NO_OBSERVATION = StepResult(observation=NOTHING, reward=0.0, terminated=False)


class Draft:
    """Three messages to begin with, then whatever `result` is."""

    name: ClassVar[str] = "draft"
    is_stochastic, max_turns = False, 1

    def __init__(self, result: Any) -> None:
        self.result = result

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        roles = ("system", "user", "user")
        return [Message(role, f"message {number}") for number, role in enumerate(roles)]

    def step(self, reply: str) -> StepResult:
        return self.result

    def oracle(self) -> str:
        return "yes"

    def close(self) -> None:
        """Nothing is open."""


def test_all_first_messages_are_shown_in_order():
    console = Console(file=io.StringIO(), record=True)
    score = play_episode(Draft(StepResult(observation="end", reward=1.0, terminated=True)), console)
    text = console.export_text()
    places = [text.index(f"message {number}") for number in range(3)]
    assert places == sorted(places) and score.rewards == [1.0]


def test_an_author_who_writes_async_code_is_told():
    async def answer() -> None:
        """Never awaited."""

    coroutine = answer()
    with pytest.raises(EnvError, match="got coroutine; write def step, not async def"):
        play_episode(Draft(coroutine), Console(file=io.StringIO()))
    coroutine.close()


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (("on", 0.0, False), "step must return a StepResult, got tuple"),
        (NO_OBSERVATION, "text or a list of parts, got None"),
    ],
)
def test_an_answer_of_a_wrong_kind_is_a_sentence(result, why):
    with pytest.raises(EnvError, match=why):
        play_episode(Draft(result), Console(file=io.StringIO()))


def test_an_observation_sends_no_control_characters_to_the_terminal():
    console = Console(file=io.StringIO(), record=True)
    result = StepResult(observation="\x1b[2Jend\x9b", reward=1.0, terminated=True)
    play_episode(Draft(result), console)
    text = console.export_text()
    assert "\\x1b[2Jend\\x9b" in text
    assert not {"\x1b", "\x9b"} & set(text)
