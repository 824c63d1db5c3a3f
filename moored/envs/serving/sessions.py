"""The sessions of a server of environments: one environment each, a time limit for every call.

A call runs in a thread of its own. One that takes too long is given up: its session is over, and
counts towards the limit until the thread has ended and the environment is closed, so that a hanging
environment cannot use up the machine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from moored.envs.base import Environment, StepResult, require_messages, require_result
from moored.envs.resources import OpenResource, SharedResources
from moored.envs.serving.wire import NoRoomError
from moored.errors import EnvError, EnvTimeoutError, MooredError
from moored.types import Message

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server allows."""

    max_sessions: int = 1024
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


class UnknownSessionError(EnvError):
    """A session that does not exist, or no longer."""


@dataclass(slots=True, eq=False)
class Session:
    """One client's environment."""

    id: str
    env: Environment
    uses: tuple[OpenResource, ...] = ()
    """What the environment shares with others, each with a bound on the calls at a time."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call, so that the calls of a session come one after another."""
    used_s: float = field(default_factory=time.monotonic)
    num_turns: int = 0
    is_over: bool = True
    last_step: tuple[int, int, StepResult] | None = None
    """Turn, hash of the reply and result of the last step: a repeated request gets the same answer.
    The reply itself may be large."""


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
        self._attaching = threading.Lock()
        self._freed = asyncio.Condition()
        """Told when a call that used a resource has ended."""
        self._ending: set[asyncio.Task[None]] = set()
        """Wait for calls that were given up."""
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        """Calls of threads that wait for one: starting a thread costs more than most calls."""

    @property
    def num_open(self) -> int:
        return len(self._open) + self._num_reserved

    async def open(self) -> Session:
        """A new session with an environment of its own."""
        if self.num_open >= self.limits.max_sessions:
            raise NoRoomError(
                f"all {self.limits.max_sessions} sessions are in use; wait for one, or start the "
                f"server with a larger --max-sessions"
            )
        self._num_reserved += 1
        try:
            async with self._making:  # the resources are opened by the first
                env, uses = await self._run(self._make, left=_made_env)
        finally:
            self._num_reserved -= 1
        session = Session(secrets.token_urlsafe(16), env, uses)
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
            session.is_over = True
            messages = await self._call(session, session.env.reset, task_seed, episode_seed)
            require_messages(messages)
            session.num_turns, session.is_over, session.last_step = 0, False, None
            return messages

    async def step(self, session: Session, reply: str, turn: int | None = None) -> StepResult:
        """Give a reply; the same reply for the same turn again gives the same result."""
        async with session.lock:
            last = session.last_step
            if last is not None and turn is not None and last[:2] == (turn, hash(reply)):
                return last[2]
            if turn is not None and turn != session.num_turns:
                raise EnvError(f"turn {session.num_turns} was expected, got a reply for {turn}")
            if session.is_over:
                raise EnvError("the episode is over or was not begun; reset it first")
            result = require_result(await self._call(session, session.env.step, reply))
            session.last_step = (session.num_turns, hash(reply), result)
            session.num_turns += 1
            session.is_over = result.is_over
            return result

    async def oracle(self, session: Session) -> str:
        """A good answer for the present state."""
        async with session.lock:
            return await self._call(session, session.env.oracle)

    async def close(self, session: Session) -> None:
        """End a session and close its environment, once no call of it is running."""
        async with session.lock:
            if self._open.pop(session.id, None) is not None:
                await self._run(session.env.close)

    async def close_idle(self) -> None:
        """Close the sessions that nobody has used for `idle_timeout_s`."""
        oldest_s = time.monotonic() - self.limits.idle_timeout_s
        await self._close_each(
            session
            for session in self._open.values()
            if session.used_s < oldest_s and not session.lock.locked()
        )

    async def close_all(self) -> None:
        """Close every session and what they share."""
        await self._close_each(self._open.values())
        self._resources.close()

    async def _close_each(self, sessions: Iterable[Session]) -> None:
        """Close sessions; one that fails is logged and keeps no other open."""
        closed = list(sessions)
        for session in closed:
            del self._open[session.id]
        await asyncio.gather(*(self._close_env(session.env) for session in closed))

    async def _close_env(self, env: Environment) -> None:
        try:
            await self._run(env.close)
        except Exception as error:
            logger.warning("%s could not be closed: %s: %s", env.name, type(error).__name__, error)

    def _make(self) -> tuple[Environment, tuple[OpenResource, ...]]:
        env = self._make_env()
        # One that was given up may still be opening a resource.
        with self._attaching:
            return env, self._resources.attach(env)

    async def _call(self, session: Session, function: Callable[..., T], *arguments: Any) -> T:
        async with self._room(session.uses) if session.uses else nullcontext():
            if session.id not in self._open:
                raise UnknownSessionError("the session was closed")
            try:
                return await self._run(function, *arguments, left=lambda _: session.env)
            except EnvTimeoutError:
                self._open.pop(session.id, None)
                raise
            finally:
                session.used_s = time.monotonic()

    @asynccontextmanager
    async def _room(self, uses: tuple[OpenResource, ...]) -> AsyncIterator[None]:
        """Wait until resources have room for one more call, and take it for the block."""
        async with self._freed:
            await self._freed.wait_for(lambda: all(shared.has_room for shared in uses))
            for shared in uses:
                shared.num_calls += 1
        try:
            yield
        finally:
            for shared in uses:
                shared.num_calls -= 1
            async with self._freed:
                self._freed.notify_all()

    async def _run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        left: Callable[[Any], Environment | None] | None = None,
    ) -> T:
        """Call a function in a thread; EnvTimeoutError when it takes too long.

        `left` says which environment a call that was given up leaves behind, from its result (None
        where it raised an error).
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                outcome: object = function(*arguments)
            except BaseException as error:  # SystemExit would end the thread without an answer
                outcome = error
            with suppress(RuntimeError):  # the loop was closed while the call was running
                loop.call_soon_threadsafe(_settle, done, outcome)

        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            work = partial(_work, calls, self._idle)
            threading.Thread(target=work, daemon=True, name="moored-session").start()
        calls.put(run)
        limit_s = self.limits.call_timeout_s
        finished, _ = await asyncio.wait([done], timeout=limit_s)
        if finished:
            return done.result()
        self._num_reserved += 1
        task = loop.create_task(self._end(done, left))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        raise EnvTimeoutError(f"the call took over {limit_s:g} s and was given up")

    async def _end(
        self, done: asyncio.Future[Any], left: Callable[[Any], Environment | None] | None
    ) -> None:
        """Once a given-up call has ended, close what it leaves behind, and free its place."""
        try:
            await asyncio.wait([done])
            env = left(None if done.exception() else done.result()) if left else None
            if env is not None:
                await self._close_env(env)
        finally:
            self._num_reserved -= 1


def _made_env(made: tuple[Environment, object] | None) -> Environment | None:
    return None if made is None else made[0]


def _work(
    calls: SimpleQueue[Callable[[], None]], idle: list[SimpleQueue[Callable[[], None]]]
) -> None:
    """Run calls one after another; one that never returns keeps its thread out of `idle`."""
    while True:
        calls.get()()
        idle.append(calls)


def _settle(done: asyncio.Future[Any], outcome: object) -> None:
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    elif isinstance(outcome, BaseException):
        done.set_exception(EnvError(f"it raised {type(outcome).__name__}: {outcome}"))
    else:
        done.set_result(outcome)
