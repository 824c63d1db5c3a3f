"""What runs inside the actor of environments: an `EnvPool` of its own, asked in batches.

Answers travel as one pickle for all, made here: Ray's own pickler is slow with many small objects.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from moored.config import RolloutConfig
from moored.engine.ray.cluster import find_modules_as_driver
from moored.envs.base import Environment, check_available
from moored.errors import EnvError, MooredError, describe_raised
from moored.rollout.pool import Answer, EnvPool, Question

POLL_S = 0.02
"""How long a call waits for an answer before it looks for new questions."""
LINGER_S = 0.001
"""Answers that follow each other this closely are sent together."""
MAKE_S = 1.0
"""How long one call makes new environments before it says that it is alive."""

MakeEnv = Callable[[], Environment]
Packet = tuple[int, bytes, Question]
"""An episode, the pickle of what makes its environment, and the question."""
Found = tuple[int, Answer, int]
"""An episode, the answer, and `max_turns` of its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvAbout:
    """Where an actor of environments runs."""

    pid: int
    node: str


class EnvHost:
    """Many environments in one process; resources are opened once, and closed by `close`."""

    def __init__(self, rollout: RolloutConfig, folder: str) -> None:
        # Options may name files relative to the folder that the run was started in.
        with suppress(OSError):
            os.chdir(folder)
        find_modules_as_driver()
        self._pool = EnvPool(workers=rollout.env_workers, timeout_s=rollout.env_timeout_s)
        self._makers: dict[bytes, MakeEnv] = {}
        self._envs: dict[int, tuple[MakeEnv, Environment]] = {}
        self._waiting: deque[Packet] = deque()
        self._is_open = False

    def open(self, makers: Sequence[bytes], pause_s: float) -> EnvAbout:
        """Make one environment of each kind, with what they share, before a rollout needs them."""
        import ray

        if self._is_open:
            # It was given up, but still lives: Ray asks its successor.
            os._exit(1)
        time.sleep(pause_s)
        for data in makers:
            make = self._maker(data)
            try:
                env = self._pool.take(make)
                check_available(env)
            except Exception as error:
                raise _cannot_make(error) from None
            self._pool.give_back(make, env)
        self._is_open = True
        return EnvAbout(pid=os.getpid(), node=ray.get_runtime_context().get_node_id())

    def work(
        self, packets: Sequence[Packet], ended: Sequence[tuple[int, bool]]
    ) -> tuple[bytes, int] | None:
        """Take questions; returns the answers that are there soon, and the number of hung threads.

        `ended` names episodes that are over, and whether their environment may be used again. None:
        the process was started again, and knows no episode.
        """
        if not self._is_open:
            return None
        for episode, is_whole in ended:
            make, env = self._envs.pop(episode, (None, None))
            if make is None or env is None:
                continue
            if is_whole:
                self._pool.give_back(make, env)
            else:
                self._pool.discard(env)
        self._waiting.extend(packets)
        self._begin()
        wait_s = 0.0 if self._waiting else POLL_S
        found = self._pool.poll(wait_s=wait_s, linger_s=LINGER_S)
        answers = to_bytes([(i, answer, self._envs[i][1].max_turns) for i, answer in found])
        return answers, self._pool.num_hung

    def _maker(self, data: bytes) -> MakeEnv:
        if data not in self._makers:
            try:
                self._makers[data] = pickle.loads(data)
            except Exception as error:
                raise _cannot_make(error) from None
        return self._makers[data]

    def _begin(self) -> None:
        """Hand questions to threads; new environments are made here, and take time."""
        end_s = time.monotonic() + MAKE_S
        while self._waiting and time.monotonic() < end_s:
            episode, data, question = self._waiting.popleft()
            if episode not in self._envs:
                make = self._maker(data)
                self._envs[episode] = make, self._pool.take(make)
            self._pool.ask([(episode, self._envs[episode][1], question)])

    def drop_calls(self) -> None:
        self._waiting.clear()
        self._pool.drop_calls()

    def close(self) -> None:
        """Close environments and what they share."""
        for make, env in self._envs.values():
            self._pool.give_back(make, env)
        self._envs.clear()
        self._pool.close()


def to_bytes(found: Sequence[Found]) -> bytes:
    """A pickle of answers; one that cannot travel becomes an `EnvError` that says why."""
    ready = [(i, _portable(a) if isinstance(a, Exception) else a, n) for i, a, n in found]
    try:
        return pickle.dumps(ready, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return pickle.dumps([(i, _portable(a), n) for i, a, n in ready], pickle.HIGHEST_PROTOCOL)


def _portable(answer: Answer) -> Answer:
    if isinstance(answer, Exception) and not isinstance(answer, MooredError):
        # In words: a pickle has no traceback, and so would lose the place.
        return EnvError(f"it {describe_raised(answer)}")
    try:
        # Some errors can be written and not be read again.
        pickle.loads(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        if isinstance(answer, Exception):
            return EnvError(f"it {describe_raised(answer)}")
        return EnvError(f"its answer cannot be sent to the driver: {type(error).__name__}: {error}")
    return answer


def _cannot_make(error: Exception) -> MooredError:
    import ray

    where = ray.util.get_node_ip_address()
    what = str(error) if isinstance(error, MooredError) else f"{type(error).__name__}: {error}"
    return EnvError(
        f"an environment actor on {where} cannot make its environments: {what}; every node needs "
        f"the same packages, folders and variables, or set engine.ray.env_actors=0"
    )
