"""The sessions of a server of environments: one environment each, a time limit for every call.

A call runs in a thread of its own. One that takes too long is given up: its session is over, and
counts towards the limit until the thread ends, so that a hanging environment cannot use up the
machine.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moored.envs.base import Environment, StepResult
from moored.envs.resources import SharedResources
from moored.errors import EnvError, EnvTimeoutError, MooredError
from moored.types import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server allows."""

    max_sessions: int = 64
    idle_timeout_s: float = 600.0
    """A session without a call for so long is closed."""
    call_timeout_s: float = 60.0
    """A call of the environment that takes longer ends its session."""
    max_request_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("max_sessions", "idle_timeout_s", "call_timeout_s", "max_request_bytes"):
            value = getattr(self, name)
            if not value > 0:
                raise MooredError(f"{name} must be positive, got {value}")


class NoRoomError(EnvError):
    """All sessions are in use."""


class UnknownSessionError(EnvError):
    """A session that does not exist, or no longer."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's environment."""

    id: str
    env: Environment
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call, so that the calls of a session come one after another."""
    used_s: float = field(default_factory=time.monotonic)
    num_turns: int = 0
    is_over: bool = True
    last_step: tuple[int, str, StepResult] | None = None
    """Turn, reply and result of the last step: a repeated request gets the same answer."""


class Sessions:
    """The open sessions of a server. All methods belong to one event loop."""

    def __init__(self, make_env: Callable[[], Environment], limits: Limits) -> None:
        self.limits = limits
        self._make_env = make_env
        self._open: dict[str, Session] = {}
        self._num_reserved = 0
        """Sessions that are being opened, and given-up ones whose call still runs."""
        self._resources = SharedResources()
        self._making = asyncio.Lock()

    @property
    def num_open(self) -> int:
        return len(self._open) + self._num_reserved

    async def open(self) -> Session:
        """A new session with an environment of its own."""
        if self.num_open >= self.limits.max_sessions:
            raise NoRoomError(
                f"all {self.limits.max_sessions} sessions are in use; close one, wait, or start "
                f"the server with more"
            )
        self._num_reserved += 1
        try:
            async with self._making:  # the resources are opened by the first
                env = await self._run(self._make)
        finally:
            self._num_reserved -= 1
        session = Session(secrets.token_urlsafe(16), env)
        self._open[session.id] = session
        return session

    def find(self, session_id: str) -> Session:
        """The session of this name."""
        session = self._open.get(session_id)
        if session is None:
            raise UnknownSessionError("there is no such session; was it idle for too long?")
        return session

    async def reset(self, session: Session, task_seed: int, episode_seed: int) -> list[Message]:
        """Begin an episode."""
        async with session.lock:
            messages = await self._call(session, session.env.reset, task_seed, episode_seed)
            session.num_turns, session.is_over, session.last_step = 0, False, None
            return messages

    async def step(self, session: Session, reply: str, turn: int | None = None) -> StepResult:
        """Give a reply; the same reply for the same turn again gives the same result."""
        async with session.lock:
            last = session.last_step
            if last is not None and turn is not None and last[:2] == (turn, reply):
                return last[2]
            if turn is not None and turn != session.num_turns:
                raise EnvError(f"turn {session.num_turns} was expected, got a reply for {turn}")
            if session.is_over:
                raise EnvError("the episode is over or was not begun; reset it first")
            result = await self._call(session, session.env.step, reply)
            session.last_step = (session.num_turns, reply, result)
            session.num_turns += 1
            session.is_over = result.is_over
            return result

    async def oracle(self, session: Session) -> str:
        """A good answer for the present state."""
        async with session.lock:
            return await self._call(session, session.env.oracle)

    async def close(self, session: Session) -> None:
        """End a session and close its environment."""
        if self._open.pop(session.id, None) is not None:
            await self._run(session.env.close)

    async def close_idle(self) -> None:
        """Close the sessions that nobody has used for `idle_timeout_s`."""
        oldest_s = time.monotonic() - self.limits.idle_timeout_s
        for session in list(self._open.values()):
            if session.used_s < oldest_s and not session.lock.locked():
                await self.close(session)

    async def close_all(self) -> None:
        """Close every session and what they share."""
        for session in list(self._open.values()):
            await self.close(session)
        self._resources.close()

    def _make(self) -> Environment:
        env = self._make_env()
        self._resources.attach(env)
        return env

    async def _call(self, session: Session, function: Callable[..., T], *arguments: Any) -> T:
        if session.id not in self._open:
            raise UnknownSessionError("the session was closed")
        try:
            return await self._run(function, *arguments)
        except EnvTimeoutError:
            self._open.pop(session.id, None)
            raise
        finally:
            session.used_s = time.monotonic()

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread; EnvTimeoutError when it takes too long."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                outcome: object = function(*arguments)
            except BaseException as error:  # SystemExit would end the thread without an answer
                outcome = error
            with suppress(RuntimeError):  # the loop was closed while the call was running
                loop.call_soon_threadsafe(_settle, done, outcome)

        threading.Thread(target=run, daemon=True, name="moored-session").start()
        limit_s = self.limits.call_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(done), limit_s)
        except TimeoutError:
            self._num_reserved += 1
            done.add_done_callback(self._release)
            raise EnvTimeoutError(f"the call took over {limit_s:g} s and was given up") from None

    def _release(self, done: asyncio.Future[Any]) -> None:
        """A given-up call has ended after all: its place is free."""
        self._num_reserved -= 1
        done.exception()  # asyncio logs exceptions that nobody asked for


def _settle(done: asyncio.Future[Any], outcome: object) -> None:
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    elif isinstance(outcome, BaseException):
        done.set_exception(EnvError(f"it raised {type(outcome).__name__}: {outcome}"))
    else:
        done.set_result(outcome)
