"""Symbolic equivalence by the math-verify package, in a child process that can be killed.

math-verify stops long work by a signal, which fails outside the main thread and cannot interrupt
a big-number computation. Here it runs in one child of this process, fed line by line; a
comparison that takes too long kills the child and counts as "not equal".
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading

from moored.envs.math_answer import bare_answer
from moored.errors import EnvError

MAX_CHARS = 300
"""Longer answers are not looked at."""
LIMIT_S = 1.0
START_LIMIT_S = 120.0
MEMORY_BYTES = 4 << 30


def require_math_verify() -> None:
    """Raise with an install hint when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise EnvError("math_verify=True needs math-verify: pip install 'moored[math]'")


def is_equivalent(given: str, expected: str) -> bool:
    """True when math-verify finds the answers equal; safe in threads, bounded in time."""
    given, expected = bare_answer(given), bare_answer(expected)
    if not given or max(len(given), len(expected)) > MAX_CHARS:
        return False
    return _VERIFIER.ask(given, expected)


class _Verifier:
    """The child process and its life: started at first use, restarted after a kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner_pid = 0

    def ask(self, given: str, expected: str) -> bool:
        with self._lock:
            verdict = _exchange(self._living_child(), json.dumps([given, expected]), LIMIT_S)
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
        if _exchange(child, "[]", START_LIMIT_S) != "ready":
            self.stop()
            raise EnvError(
                "the math-verify process did not start; try `python -c 'import math_verify'`, "
                "or set math_verify=False"
            )
        return child


def _exchange(child: subprocess.Popen[str], line: str, limit_s: float) -> str:
    """Send a line and return the answer; an empty one when the child died or ran out of time."""
    assert child.stdin is not None and child.stdout is not None
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
        return child.stdout.readline().strip()
    except OSError:
        return ""
    finally:
        timer.cancel()


_VERIFIER = _Verifier()
atexit.register(_VERIFIER.stop)


def _serve() -> None:
    """The child: read `[given, expected]` lines, write `true` or `false`; `[]` asks if it is up."""
    from math_verify import parse, verify

    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            print("ready", flush=True)
            continue
        given, expected = (parse(f"${text}$", parsing_timeout=0) for text in request)
        is_equal = verify(expected, given, timeout_seconds=None)
        print("true" if is_equal else "false", flush=True)


if __name__ == "__main__":
    _serve()
