"""Symbolic equivalence by the math-verify package, in a process that can be killed.

math-verify stops long work by a signal, which fails outside the main thread and cannot interrupt
a big-number computation. Here it runs in a `Worker`; a comparison that takes too long counts as
"not equal".
"""

from __future__ import annotations

import functools
import importlib.util
import re

from moored.envs.math.answer import bare_answer, same_answer
from moored.envs.worker import Worker, WorkerLost
from moored.errors import EnvError

MAX_CHARS = 300
"""Longer answers are not looked at."""
LIMIT_S = 1.0
"""Computing time of one comparison; time in which the machine does other things does not count."""
WALL_LIMIT_S = 20.0
"""Backstop for what LIMIT_S does not stop: a comparison that waits."""
INTEGER = re.compile("-?[0-9,]+")
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4}")
"""Words are not mathematics; commands of LaTeX are."""

_VERIFIER = Worker(f"{__name__}:compare", prepare=f"{__name__}:warm_up", memory_bytes=4 << 30)


def require_math_verify() -> None:
    """Raise with an install hint when math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise EnvError("math_verify=True needs math-verify: pip install 'moored[math]'")


def start_verifier() -> None:
    """Start the child process unless it runs, so that no answer waits the 1 s this takes."""
    try:
        _VERIFIER.start()
    except EnvError as error:
        raise EnvError(
            "the math-verify process did not start; try `python -c 'import math_verify'`, or set "
            "math_verify=False"
        ) from error


def is_equivalent(given: str, expected: str) -> bool:
    """True when math-verify finds the answers equal; safe in threads, bounded in time."""
    given, expected = bare_answer(given), bare_answer(expected)
    if not given or max(len(given), len(expected)) > MAX_CHARS or WORD.search(given):
        return False
    if INTEGER.fullmatch(given) and INTEGER.fullmatch(expected):
        return same_answer(given, expected)  # by far the most wrong answers, at no cost
    return _verdict(given, expected)


@functools.lru_cache(maxsize=1 << 14)
def _verdict(given: str, expected: str) -> bool:
    """The members of a group often give the same answer."""
    start_verifier()
    try:
        return _VERIFIER.ask(given, expected, cpu_s=LIMIT_S, wall_s=WALL_LIMIT_S)
    except WorkerLost:
        return False


def warm_up() -> None:
    """In the child: make one comparison, so that every later process has loaded its parts."""
    import math_verify

    math_verify.verify(math_verify.parse("$x^2+2x+1$"), math_verify.parse("$(x+1)^2$"))


def compare(given: str, expected: str) -> bool:
    """In the child: math-verify's verdict; what it fails on is not equal."""
    from math_verify import parse, verify

    try:
        left, right = (parse(f"${text}$", parsing_timeout=0) for text in (given, expected))
        return bool(verify(right, left, timeout_seconds=None))
    except Exception:
        return False
