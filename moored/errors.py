"""The errors users see. Each says what was wrong, what was given, and what to do.

Every error is also a `ValueError`, so callers that do not know moored can catch it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MooredError(ValueError):
    """Anything a user can fix: an option, a file, an input array."""


class ConfigError(MooredError):
    """A configuration key or value that cannot be used."""


class UnknownNameError(MooredError):
    """A name that is neither registered nor a `module:attribute` path."""


class EnvError(MooredError):
    """An environment that breaks its contract or cannot make a task."""


class EnvTimeoutError(EnvError):
    """A call of an environment that took longer than `rollout.env_timeout_s`."""


class TooFewPromptsError(MooredError):
    """A measurement that needs more distinct prompts or reasonings than it was given."""


class RunLogError(MooredError):
    """A run directory that cannot be read or written."""


def close_match_hint(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` when something known is close, else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(known)}" if known else "nothing is registered"
