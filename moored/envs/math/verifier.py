"""Symbolic equivalence by the math-verify package, in processes that can be killed.

math-verify stops long work by a signal, which fails outside the main thread and cannot interrupt
a big-number computation. Here it runs in a child of this process, fed line by line. The child
imports the package once and forks a worker; a comparison that takes too long kills the worker,
counts as "not equal", and the next worker is there within milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading

from moored.envs.math.answer import bare_answer, same_answer
from moored.envs.math.cost import looks_costly
from moored.errors import EnvError

MAX_CHARS = 300
"""Longer answers are not looked at."""
LIMIT_S = 1.0
"""Computing time of one comparison; time in which the machine does other things does not count."""
WALL_LIMIT_S = 20.0
"""Backstop for what LIMIT_S does not stop: a worker that waits, and systems without timers."""
START_LIMIT_S = 120.0
MEMORY_BYTES = 4 << 30
DIED = "died"
INTEGER = re.compile("-?[0-9,]+")


def require_math_verify() -> None:
    """Raise with an install hint when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise EnvError("math_verify=True needs math-verify: pip install 'moored[math]'")


def start_verifier() -> None:
    """Start the child process, if it is not there: about 1 s that no answer then waits for."""
    _VERIFIER.start()


def is_equivalent(given: str, expected: str) -> bool:
    """True when math-verify finds the answers equal; safe in threads, bounded in time."""
    given, expected = bare_answer(given), bare_answer(expected)
    if not given or max(len(given), len(expected)) > MAX_CHARS or looks_costly(given):
        return False
    if INTEGER.fullmatch(given) and INTEGER.fullmatch(expected):
        return same_answer(given, expected)  # by far the most wrong answers, at no cost
    return _verdict(given, expected)


@functools.lru_cache(maxsize=1 << 14)
def _verdict(given: str, expected: str) -> bool:
    """The members of a group often give the same answer."""
    return _VERIFIER.ask(given, expected)


class _Verifier:
    """The child process and its life: started at first use, restarted when it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner_pid = 0
        self._num_requests = 0

    def start(self) -> None:
        with self._lock:
            self._living_child()

    def ask(self, given: str, expected: str) -> bool:
        with self._lock:
            child = self._living_child()
            self._num_requests += 1
            request = [self._num_requests, LIMIT_S, given, expected]
            verdict = _exchange(child, request, WALL_LIMIT_S)
            if not verdict:
                self.stop()
            return verdict == "true"

    def stop(self) -> None:
        """End the child; after a fork it belongs to the other process and is left alone."""
        child, self._child = self._child, None
        if child is None or self._owner_pid != os.getpid():
            return
        child.kill()
        child.communicate()

    def _living_child(self) -> subprocess.Popen[str]:
        if self._child and self._owner_pid == os.getpid() and self._child.poll() is None:
            return self._child
        self.stop()
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._child, self._owner_pid = child, os.getpid()
        if _exchange(child, [0, START_LIMIT_S, "x^2", "x \\cdot x"], START_LIMIT_S) != "true":
            self.stop()
            raise EnvError(
                "the math-verify process did not start; try `python -c 'import math_verify'`, "
                "or set math_verify=False"
            )
        return child


def _exchange(child: subprocess.Popen[str], request: list[object], limit_s: float) -> str:
    """Send a request and return the verdict; an empty one when the child was lost."""
    assert child.stdin is not None and child.stdout is not None
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        # An answer to an earlier request is passed over.
        while (line := child.stdout.readline()) and line != f"{DIED}\n":
            number, verdict = line.split()
            if int(number) == request[0]:
                return verdict
        return line.strip()
    except OSError:
        return ""
    finally:
        timer.cancel()


_VERIFIER = _Verifier()
atexit.register(_VERIFIER.stop)


def _serve() -> None:
    """The child: fork a worker, and another one whenever one has died over a request."""
    import math_verify

    # What the first comparison loads and builds, every worker then has from its parent.
    math_verify.verify(math_verify.parse("$x^2+2x+1$"), math_verify.parse("$(x+1)^2$"))
    if not hasattr(os, "fork"):
        return _answer_requests()
    while True:
        worker = os.fork()
        if worker == 0:
            _answer_requests()
            os._exit(0)
        if os.waitpid(worker, 0)[1] == 0:
            return
        print(DIED, flush=True)


def _answer_requests() -> None:
    """The worker: read `[number, limit_s, given, expected]`, write `number true` or `false`."""
    from math_verify import parse, verify

    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        number, limit_s, *answers = json.loads(line)
        _die_after(limit_s)
        given, expected = (parse(f"${text}$", parsing_timeout=0) for text in answers)
        is_equal = verify(expected, given, timeout_seconds=None)
        _die_after(0.0)
        print(number, "true" if is_equal else "false", flush=True)


def _die_after(cpu_s: float) -> None:
    """Have the system kill this process after so much computing; 0 calls it off.

    SIGPROF without a handler ends a process even within one long call into C, which neither an
    exception nor a thread could. Windows has no such timer.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    _serve()
