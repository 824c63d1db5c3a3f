"""The other processes of `check_env`: fresh ones that make first messages, one that is watched.

An environment under test may hang, exit or crash its process. So the rules run in a child that
says what it calls next; when it falls silent for too long, it is killed and the last call is named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moored.envs.check.probe import NotApplicable, Subject
from moored.envs.check.types import Broken
from moored.errors import MooredError
from moored.types import messages_digest

HASH_SEEDS = ("1", "2")
START_LIMIT_S = 120.0

Note = tuple[str, object]
"""What a watched child tells: the kind, and what goes with it."""
Notes = queue.Queue[Note | None]
"""None stands at the end."""
CALL, EVENT, ERROR = "call", "event", "error"
"""What is called next; what `run` yields; what it raises."""
T = TypeVar("T")


class ChildDied(Exception):
    """The watched child hung or ended; the message says during which call."""


def digests_in_fresh_processes(subject: Subject) -> list[list[str]]:
    """First-message digests of all seeds, as processes with other hash seeds find them."""
    job = pickle.dumps((subject.portable_maker(), subject.seeds))
    subject.announce("reset in a fresh process")
    children = [_start("print_digests", PYTHONHASHSEED=hash_seed) for hash_seed in HASH_SEEDS]
    try:
        return [_read_digests(child, job) for child in children]
    finally:
        for child in children:
            _end(child)


def print_digests() -> None:
    """Run in a fresh process: read a job from stdin, print the digests as JSON."""
    maker, seeds = pickle.load(sys.stdin.buffer)
    env = maker()
    print(json.dumps([messages_digest(env.reset(seed)) for seed in seeds]))


def _read_digests(child: subprocess.Popen[bytes], job: bytes) -> list[str]:
    try:
        output, errors = child.communicate(job, timeout=START_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Broken(f"a fresh process took over {START_LIMIT_S:g} s for reset") from None
    if child.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        raise Broken(f"a fresh process could not make the first messages: {lines[-1]}")
    return json.loads(output.splitlines()[-1])


def watch_child(
    run: Callable[[Subject, list[str]], Iterable[T]],
    subject: Subject,
    names: list[str],
    *,
    call_limit_s: float,
) -> Iterator[T]:
    """What `run(subject, names)`, a function at the top of a module, yields in a child process.

    Raises its MooredErrors, NotApplicable when the child cannot be handed the environment, and
    ChildDied when one call took over `call_limit_s` or ended the process.
    """
    portable = dataclasses.replace(subject, maker=subject.portable_maker())
    job = pickle.dumps((run, portable, names))
    last_call, limit_s = "starting the process", START_LIMIT_S
    with _listening(_start("tell_events"), job) as (child, notes):
        while (note := _next_note(notes, last_call, limit_s)) is not None:
            kind, what = note
            if kind == CALL:
                last_call, limit_s = str(what), call_limit_s
            elif kind == EVENT:
                yield what  # pyright: ignore[reportReturnType]
            else:
                raise what  # pyright: ignore[reportGeneralTypeIssues]
        if child.wait() != 0:
            raise ChildDied(f"{last_call} ended the process, exit code {child.returncode}")


def _next_note(notes: Notes, last_call: str, limit_s: float) -> Note | None:
    try:
        return notes.get(timeout=limit_s)
    except queue.Empty:
        raise ChildDied(f"{last_call} had not returned after {limit_s:g} s") from None


def tell_events() -> None:
    """Run in the watched child: read the job from stdin, write pickled notes to stdout."""
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an environment prints is no note

    def tell(kind: str, what: object) -> None:
        pickle.dump((kind, what), stream)
        stream.flush()

    try:
        run, subject, names = pickle.load(sys.stdin.buffer)
    except Exception as error:
        return tell(ERROR, NotApplicable(f"a fresh process cannot load this class: {error!r}"))
    watched = dataclasses.replace(subject, announce=lambda call: tell(CALL, call), is_watched=True)
    try:
        for event in run(watched, names):
            tell(EVENT, event)
    except MooredError as error:
        tell(ERROR, error)


@contextmanager
def _listening(
    child: subprocess.Popen[bytes], job: bytes
) -> Iterator[tuple[subprocess.Popen[bytes], Notes]]:
    """Hand over the job; the child, and a queue that fills with what it tells."""
    notes: Notes = queue.Queue()

    def listen() -> None:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(job)
            child.stdin.close()
            while True:
                notes.put(pickle.load(child.stdout))
        except (EOFError, OSError, pickle.UnpicklingError):
            notes.put(None)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield child, notes
    finally:
        child.kill()
        child.wait()
        listener.join(timeout=5.0)
        if not listener.is_alive():
            _end(child)


def _start(function: str, **environ: str) -> subprocess.Popen[bytes]:
    """A child that calls a function of this module, with this process's import path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import {function}; {function}()"],
        env=os.environ | environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if function == "print_digests" else None,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
