"""Sessions of a server whose environments hang, fail to close, or share what has little room."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest

from moored.envs.base import Resource, StepResult
from moored.envs.serving.sessions import Limits, Session, Sessions, UnknownSessionError
from moored.errors import EnvError, EnvTimeoutError
from moored.types import Message


class Plain:
    """Answers everything."""

    name: ClassVar[str] = "plain"
    is_stochastic = False
    max_turns = 3

    def __init__(self) -> None:
        self.is_closed = False

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        if task_seed == 13:
            raise EnvError("there is no such task")
        return [Message("user", "Begin.")]

    def step(self, reply: str) -> StepResult:
        return StepResult(observation=reply, reward=0.0, terminated=False)

    def oracle(self) -> str:
        return "end"

    def close(self) -> None:
        self.is_closed = True


async def opened(sessions: Sessions) -> Session:
    session = await sessions.open()
    await sessions.reset(session, 0, 0)
    return session


async def until_empty(sessions: Sessions) -> None:
    while sessions.num_open:
        await asyncio.sleep(0.005)


def test_an_environment_whose_call_was_given_up_is_closed_when_the_call_ends() -> None:
    gate = threading.Event()

    class Slow(Plain):
        def step(self, reply: str) -> StepResult:
            gate.wait(30)
            return super().step(reply)

    async def play() -> None:
        sessions = Sessions(Slow, Limits(call_timeout_s=0.05))
        session = await opened(sessions)
        with pytest.raises(EnvTimeoutError):
            await sessions.step(session, "a")
        assert isinstance(session.env, Slow) and not session.env.is_closed
        gate.set()
        await until_empty(sessions)
        assert session.env.is_closed

    asyncio.run(play())


def test_an_environment_that_is_made_too_late_is_closed() -> None:
    gate = threading.Event()
    made: list[Plain] = []

    def make() -> Plain:
        gate.wait(30)
        made.append(Plain())
        return made[-1]

    async def play() -> None:
        sessions = Sessions(make, Limits(call_timeout_s=0.05))
        with pytest.raises(EnvTimeoutError):
            await sessions.open()
        assert sessions.num_open == 1
        gate.set()
        await until_empty(sessions)
        assert [env.is_closed for env in made] == [True]

    asyncio.run(play())


def test_an_environment_that_fails_to_close_keeps_no_other_session_open() -> None:
    closed: list[int] = []

    class Stubborn(Plain):
        def close(self) -> None:
            closed.append(1)
            raise OSError("still in use")

    async def play() -> None:
        sessions = Sessions(Stubborn, Limits(idle_timeout_s=0.01))
        idle = [await sessions.open() for _ in range(3)]
        await asyncio.sleep(0.03)
        await sessions.close_idle()
        assert sessions.num_open == 0 and len(closed) == 3
        for session in idle:
            with pytest.raises(UnknownSessionError):
                sessions.find(session.id)
        for _ in range(2):
            await sessions.open()
        await sessions.close_all()
        assert sessions.num_open == 0 and len(closed) == 5

    asyncio.run(play())


def test_calls_that_share_a_resource_are_no_more_than_it_allows() -> None:
    calls: list[int] = []

    @dataclass
    class Narrow(Resource):
        max_concurrency: int | None = 1

    class Sharing(Plain):
        num_running = 0

        def resources(self) -> dict[str, Resource]:
            return {"narrow": Narrow()}

        def step(self, reply: str) -> StepResult:
            Sharing.num_running += 1
            calls.append(Sharing.num_running)
            time.sleep(0.02)
            Sharing.num_running -= 1
            return super().step(reply)

    async def play() -> None:
        sessions = Sessions(Sharing, Limits())
        some = [await opened(sessions) for _ in range(4)]
        await asyncio.gather(*(sessions.step(session, "a") for session in some))
        assert calls == [1, 1, 1, 1]

    asyncio.run(play())


def test_no_step_goes_on_with_the_episode_before_a_reset_that_failed() -> None:
    async def play() -> None:
        sessions = Sessions(Plain, Limits())
        session = await opened(sessions)
        await sessions.step(session, "a")
        with pytest.raises(EnvError, match="no such task"):
            await sessions.reset(session, 13, 0)
        with pytest.raises(EnvError, match="reset it first"):
            await sessions.step(session, "b")

    asyncio.run(play())


def test_an_environment_is_not_closed_in_the_middle_of_a_call() -> None:
    gate = threading.Event()
    seen: list[bool] = []

    class Slow(Plain):
        def step(self, reply: str) -> StepResult:
            gate.wait(30)
            seen.append(self.is_closed)
            return super().step(reply)

    async def play() -> None:
        sessions = Sessions(Slow, Limits())
        session = await opened(sessions)
        step = asyncio.create_task(sessions.step(session, "a"))
        await asyncio.sleep(0.02)
        close = asyncio.create_task(sessions.close(session))
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(step, close)
        assert seen == [False] and sessions.num_open == 0
        assert isinstance(session.env, Slow) and session.env.is_closed

    asyncio.run(play())
