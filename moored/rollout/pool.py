"""A pool of environments: kept for reuse, called in threads under a time limit, sharing resources.

`EnvCalls` is what episodes need of environments, wherever those live: `EnvPool` calls them in
threads of this process, `moored.engine.ray.env_pool.ActorPool` in processes of a cluster.
`EnvPool` hands out environments (`take`, `give_back`, `discard`) and runs their calls (`submit`,
`ask`, `poll`, `run_all`). What a call raises is data. A call beyond its limit comes back as an
`EnvTimeoutError`; its thread and its environment are given up, and a new thread takes over the
queue. A call that holds the interpreter lock in C cannot be given up: such an environment belongs
in a process of its own (`moored.envs.worker`).
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from moored.config import RolloutConfig
from moored.engine.base import ClusterEngine
from moored.envs.base import Environment, StepResult, begin, respond
from moored.envs.resources import OpenResource, SharedResources
from moored.errors import EnvError, EnvTimeoutError, describe_raised
from moored.types import Message

Question = tuple[int, int] | str
"""What an environment is asked: the seeds of a task and an episode to begin, or to read a reply."""
Answer = list[Message] | StepResult | Exception
"""What it returned or raised."""
Answers = list[tuple[Any, Answer]]
"""Each with the key of its question."""


T = TypeVar("T")
Finished = list[tuple[Any, Any]]
"""Key of a call, and what it returned or the Exception it raised."""

LOOK_UP_S = 0.1
"""Longest wait before the clock and Ctrl-C are checked again."""
GRACE_S = 2.0
"""How long `close` and `drop_calls` wait for calls that are still running."""

logger = logging.getLogger(__name__)


class Played(Protocol):
    """An environment as an episode sees it."""

    @property
    def max_turns(self) -> int: ...


E = TypeVar("E", bound=Played)


class EnvCalls(Protocol[E]):
    """Hands out environments and carries questions to them. What one raises is data, and so is an
    `EnvTimeoutError` for a question that takes too long. Methods are called from one thread at a
    time.
    """

    def take(self, make_env: Callable[[], Environment]) -> E:
        """An environment for one episode; what another has given back is used again."""
        ...

    def give_back(self, make_env: Callable[[], Environment], env: E) -> None:
        """Keep an environment for the next episode."""
        ...

    def discard(self, env: E) -> None:
        """Close an environment that may be broken."""
        ...

    def ask(self, questions: Sequence[tuple[int, E, Question]]) -> None:
        """Begin to answer questions, each with its key and the environment it is for.

        `poll` gives the answers under these keys. An environment is asked one thing at a time.
        """
        ...

    def poll(self, *, wait_s: float | None = None, linger_s: float | None = 0.0) -> Answers:
        """Answers that are there; [] if nothing was asked.

        Waits until one is, or for `wait_s` seconds; then for more, until all are or nothing came
        for `linger_s` (None: until all are).
        """
        ...

    def drop_calls(self) -> None:
        """Forget every question."""
        ...

    def close(self) -> None:
        """Close environments and what they share."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    key: Hashable
    run: Callable[[], object]
    env: Environment | None
    uses: tuple[OpenResource, ...]
    """Resources of the environment, each with a bound on the calls at a time."""


class EnvPool:
    """Environments by the function that makes them, and the threads that call them; close it.

    `workers` calls run at a time. `timeout_s` limits each call, counted from its start; None sets
    no limit. All methods must be called from one thread.
    """

    def __init__(self, *, workers: int = 1, timeout_s: float | None = 60.0) -> None:
        self._idle: dict[Callable[[], Environment], list[Environment]] = {}
        self._resources = SharedResources()
        self._uses: dict[int, tuple[OpenResource, ...]] = {}
        self._hung: list[Environment | None] = []
        self._threads = _Threads(workers, timeout_s)

    def take(self, make_env: Callable[[], Environment]) -> Environment:
        """An idle environment, or a new one with its resources opened."""
        idle = self._idle.get(make_env)
        if idle:
            return idle.pop()
        env = make_env()
        uses = self._resources.attach(env)
        if uses:
            self._uses[id(env)] = uses
        return env

    def give_back(self, make_env: Callable[[], Environment], env: Environment) -> None:
        """Keep an environment for the next episode; one that hangs is discarded."""
        if self._is_hung(env):
            self.discard(env)
        else:
            self._idle.setdefault(make_env, []).append(env)

    def discard(self, env: Environment) -> None:
        """Close an environment that may be broken; one that hangs is closed in the background."""
        self._uses.pop(id(env), None)
        wait_s = 0.0 if self._is_hung(env) else GRACE_S
        self._hung = [other for other in self._hung if other is not env]
        closer = threading.Thread(target=_close_all, args=([env],), daemon=True)
        closer.start()
        closer.join(wait_s)

    def submit(
        self, key: Hashable, call: Callable[[], object], *, env: Environment | None = None
    ) -> None:
        """Queue a call; `poll` gives its result under `key`. `env` is the environment it calls.

        Naming `env` bounds the calls that use its resources.
        """
        self._threads.put([_Call(key, call, env, self._uses.get(id(env), ()))])

    def ask(self, questions: Iterable[tuple[Hashable, Environment, Question]]) -> None:
        """Queue questions (key, environment, question); `poll` gives the answers by key."""
        self._threads.put(
            [
                _Call(key, _question(env, question), env, self._uses.get(id(env), ()))
                for key, env, question in questions
            ]
        )

    def poll(self, *, wait_s: float | None = None, linger_s: float | None = 0.0) -> Finished:
        """What has finished or expired; [] if no call is pending.

        Waits until something has, or for `wait_s` seconds; then for more, until all calls have or
        nothing came for `linger_s` (None: until all have). A result is what the call returned, or
        the Exception it raised.
        """
        finished, expired = self._threads.collect(wait_s, linger_s)
        self._hung += [call.env for call in expired]
        for call in expired:
            error = EnvTimeoutError(
                f"the call took over {self._threads.timeout_s:g} s and was given up; raise "
                f"rollout.env_timeout_s if that is not long enough"
            )
            finished.append((call.key, error))
        return finished

    def run_all(
        self, calls: Iterable[Callable[[], T]], envs: Iterable[Environment | None] = ()
    ) -> list[T | Exception]:
        """Results of all calls, in order; `envs` names the environment of each, as in `submit`."""
        assert not self._threads.num_pending, "run_all needs a pool without pending calls"
        num_calls = 0
        for call, env in zip(calls, itertools.chain(envs, itertools.repeat(None)), strict=False):
            self.submit(num_calls, call, env=env)
            num_calls += 1
        found: dict[Hashable, Any] = {}
        while len(found) < num_calls:
            found.update(self.poll(linger_s=None))
        return [found[index] for index in range(num_calls)]

    def drop_calls(self) -> None:
        """Forget every call; one that is running may finish, or is given up after `GRACE_S`."""
        self._hung += [call.env for call in self._threads.drop_calls(GRACE_S)]

    def close(self) -> None:
        """Close environments and resources; calls that are still running are given up."""
        try:
            self.drop_calls()
            idle = itertools.chain.from_iterable(self._idle.values())
            closer = threading.Thread(target=_close_all, args=(list(idle),), daemon=True)
            closer.start()
            closer.join(self._threads.timeout_s)
            if closer.is_alive():
                logger.warning("environments were still closing when the pool was closed")
        finally:
            self._idle.clear()
            self._uses.clear()
            self._hung.clear()
            self._threads.stop()
            self._resources.close()

    @property
    def num_hung(self) -> int:
        """Threads that were given up and still run."""
        return self._threads.num_hung()

    def _is_hung(self, env: Environment) -> bool:
        return any(env is other for other in self._hung)

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _question(env: Environment, question: Question) -> Callable[[], object]:
    is_reply = isinstance(question, str)
    return partial(respond, env, question) if is_reply else partial(begin, env, *question)


def thread_pool(rollout: RolloutConfig) -> EnvPool:
    """Environments in this process, as the options say."""
    return EnvPool(workers=rollout.env_workers, timeout_s=rollout.env_timeout_s)


def make_pool(engine: object, rollout: RolloutConfig) -> EnvCalls[Any]:
    """Environments where the engine of a run wants them; close it before the engine."""
    return engine.make_pool() if isinstance(engine, ClusterEngine) else thread_pool(rollout)


class _Worker(threading.Thread):
    """Runs calls until it is given up; what they raise is data, and is caught nowhere else."""

    def __init__(self, threads: _Threads) -> None:
        super().__init__(daemon=True, name="moored-env")
        self.threads = threads
        self.call: _Call | None = None
        self.started_s = 0.0
        self.is_given_up = False

    def run(self) -> None:
        result: object = None
        while (call := self.threads.exchange(self, result)) is not None:
            try:
                result = call.run()
            except Exception as error:
                result = error
            except BaseException as error:  # SystemExit would end the thread silently
                result = EnvError(f"it {describe_raised(error)}")


class _Threads:
    """A queue of calls, the daemon threads that run them, and what they returned.

    A worker hands in a result and takes its next call under one lock, and gives notice of the first
    result and of the last: a batch of short calls costs two thread switches, not two per call.
    """

    def __init__(self, max_workers: int, timeout_s: float | None) -> None:
        self.max_workers = max_workers
        self.timeout_s = timeout_s
        self.num_pending = 0
        """Calls submitted whose results were not collected yet."""
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._news = threading.Condition(lock)
        self._todo: deque[_Call] = deque()
        self._done: Finished = []
        self._workers: list[_Worker] = []
        self._given_up: list[_Worker] = []
        self._num_idle = 0

    def put(self, calls: Sequence[_Call]) -> None:
        """Queue calls and see that threads run them."""
        with self._work:
            self.num_pending += len(calls)
            self._todo.extend(calls)
            num_woken = min(len(calls), self._num_idle)
            self._num_idle -= num_woken
            self._work.notify(num_woken)
            num_more = min(len(calls) - num_woken, self.max_workers - len(self._workers))
            for _ in range(num_more):
                self._start_worker()

    def collect(self, wait_s: float | None, linger_s: float | None) -> tuple[Finished, list[_Call]]:
        """Finished results, and calls that were given up."""
        end_s = math.inf if wait_s is None else time.monotonic() + wait_s
        with self._news:
            expired = self._expire()
            while self.num_pending and not self._done and not expired:
                left_s = end_s - time.monotonic()
                if left_s <= 0.0:
                    break
                self._news.wait(min(left_s, self._patience_s()))
                expired = self._expire()
            if self._done or expired:
                expired += self._linger(linger_s, len(expired))
            done, self._done = self._done, []
            self.num_pending -= len(done) + len(expired)
            return done, expired

    def _linger(self, linger_s: float | None, num_expired: int) -> list[_Call]:
        """Wait for all results, or until none came for `linger_s`; more calls that were given up.

        Workers give notice of the last call in the queue, not of each: a batch of short calls then
        costs two switches between threads.
        """
        expired: list[_Call] = []
        quiet_since_s, num_done = time.monotonic(), len(self._done)
        while len(self._done) + num_expired + len(expired) < self.num_pending:
            left_s = self._patience_s()
            if linger_s is not None:
                left_s = min(left_s, quiet_since_s + linger_s - time.monotonic())
            if left_s <= 0.0:
                break
            self._news.wait(left_s)
            late = self._expire()
            if late or len(self._done) > num_done:
                quiet_since_s, num_done = time.monotonic(), len(self._done)
            expired += late
        return expired

    def exchange(self, worker: _Worker, result: object) -> _Call | None:
        """Called by a worker: its result for its next call; None when it was given up."""
        with self._work:
            if worker.call is not None and not worker.is_given_up:
                self._done.append((worker.call.key, result))
                self._release(worker)
                if len(self._done) == 1 or not self._todo:
                    self._news.notify()
            while not worker.is_given_up:
                if self._begin_next(worker):
                    return worker.call
                self._num_idle += 1
                self._work.wait()
            return None

    def drop_calls(self, grace_s: float) -> list[_Call]:
        """Forget all calls; returns those that were still running after `grace_s`."""
        with self._news:
            self._todo.clear()
            deadline_s = time.monotonic() + grace_s
            while self._busy() and time.monotonic() < deadline_s:
                self._news.wait(LOOK_UP_S)
            self._done, self.num_pending = [], 0
            return [self._give_up(worker) for worker in self._busy()]

    def num_hung(self) -> int:
        """Threads that were given up and still run."""
        with self._work:
            self._given_up = [worker for worker in self._given_up if worker.is_alive()]
            return len(self._given_up)

    def stop(self) -> None:
        """End the threads."""
        with self._work:
            for worker in self._workers:
                worker.is_given_up = True
            self._workers.clear()
            self._num_idle = 0
            self._work.notify_all()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self))
        self._workers[-1].start()

    def _begin_next(self, worker: _Worker) -> bool:
        """Give `worker` the first call whose resources have room."""
        for index, call in enumerate(self._todo):
            if all(shared.has_room for shared in call.uses):
                del self._todo[index]
                for shared in call.uses:
                    shared.num_calls += 1
                worker.call, worker.started_s = call, time.monotonic()
                return True
        return False

    def _release(self, worker: _Worker) -> None:
        """Take a worker's call away from it."""
        assert worker.call is not None
        for shared in worker.call.uses:
            shared.num_calls -= 1
        worker.call = None

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.call is not None]

    def _expire(self) -> list[_Call]:
        """Give up the workers whose calls took too long."""
        if self.timeout_s is None:
            return []
        now_s = time.monotonic()
        late = [worker for worker in self._busy() if now_s - worker.started_s > self.timeout_s]
        return [self._give_up(worker) for worker in late]

    def _give_up(self, worker: _Worker) -> _Call:
        call = worker.call
        assert call is not None
        worker.is_given_up = True
        self._release(worker)
        self._workers.remove(worker)
        self._given_up.append(worker)
        if self._todo:
            self._start_worker()
        return call

    def _patience_s(self) -> float:
        """Until the next call expires, at most LOOK_UP_S."""
        if self.timeout_s is None:
            return LOOK_UP_S
        first_s = min((worker.started_s for worker in self._busy()), default=time.monotonic())
        left_s = first_s + self.timeout_s - time.monotonic()
        return min(max(left_s, 0.001), LOOK_UP_S)


def _close_all(envs: Iterable[Environment]) -> None:
    for env in envs:
        try:
            env.close()
        except Exception as error:
            logger.warning("%s could not be closed: %s: %s", env.name, type(error).__name__, error)
