"""The other processes of `check_env`: fresh ones that make first messages, one that is watched.

An environment under test may hang, exit or crash its process. So the rules run in a `Worker` that
says what it calls next; when it is silent for too long, it is killed and the last call is named.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from moored.envs.check.probe import NotApplicable, Subject
from moored.envs.check.types import Broken
from moored.envs.resources import SharedResources
from moored.envs.serving.wire import NoRoomError
from moored.envs.worker import START_LIMIT_S, Worker, WorkerLost, emit
from moored.types import messages_digest

HASH_SEEDS = ("1", "2")
CALL, EVENT = "call", "event"
"""What a watched child reports: the call it makes next, and what `run` yields."""
T = TypeVar("T")


class ChildDied(Exception):
    """The watched child hung or ended; the message says during which call."""


def digests_in_fresh_processes(subject: Subject) -> list[list[str]]:
    """First-message digests of all seeds, as processes with other hash seeds find them."""
    job = pickle.dumps((subject.portable_maker(), subject.seeds))
    subject.announce("reset in a fresh process")
    with ThreadPoolExecutor(len(HASH_SEEDS)) as threads:
        return list(threads.map(lambda hash_seed: _digests(job, hash_seed), HASH_SEEDS))


def _digests(job: bytes, hash_seed: str) -> list[str]:
    worker = Worker(f"{__name__}:make_digests", environ={"PYTHONHASHSEED": hash_seed})
    try:
        return worker.ask(job, wall_s=START_LIMIT_S)
    except WorkerLost as lost:
        raise Broken(f"a fresh process gave no first messages, {lost}") from None
    except NoRoomError:
        raise
    except Exception as error:
        raise Broken(
            f"a fresh process could not make the first messages: {type(error).__name__}: {error}"
        ) from error
    finally:
        worker.stop()


def make_digests(job: bytes) -> list[str]:
    """Run in a fresh process: the digests of a pickled maker and its seeds."""
    maker, seeds = pickle.loads(job)
    with closing(SharedResources()) as shared:
        env = maker()
        shared.attach(env)
        return [messages_digest(env.reset(seed)) for seed in seeds]


def watch_child(
    run: Callable[[Subject, list[str]], Iterable[T]],
    subject: Subject,
    names: list[str],
    *,
    call_limit_s: float,
) -> Iterator[T]:
    """What `run(subject, names)`, a function at the top of a module, yields in a child process.

    Raises what it raises, NotApplicable when the child cannot be handed the environment, and
    ChildDied when one call took over `call_limit_s` or ended the process.
    """
    portable = dataclasses.replace(subject, maker=subject.portable_maker())
    job = pickle.dumps((run, portable, names))
    worker = Worker(f"{__name__}:run_watched", is_quiet=False)
    last_call, limit_s = "starting the process", START_LIMIT_S
    try:
        for kind, what in worker.watch(job, limit_s=call_limit_s):
            if kind == CALL:
                last_call, limit_s = str(what), call_limit_s
            else:
                yield what
    except WorkerLost as lost:
        if lost.is_late:
            raise ChildDied(f"{last_call} had not returned after {limit_s:g} s") from None
        raise ChildDied(f"{last_call} ended the process, {lost}") from None
    finally:
        worker.stop()


def run_watched(job: bytes) -> None:
    """Run in the watched child: report each call before it is made, and each event."""
    try:
        run, subject, names = pickle.loads(job)
    except Exception as error:
        raise NotApplicable(f"a fresh process cannot load this class: {error!r}") from error
    watched = dataclasses.replace(
        subject, announce=lambda call: emit((CALL, call)), is_watched=True
    )
    for event in run(watched, names):
        emit((EVENT, event))
