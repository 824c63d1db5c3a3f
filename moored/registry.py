"""Names and the objects they stand for, imported on first use.

A registry maps short names to `"module:attribute"` strings. `get` also takes such a string
directly, so user code need not be registered.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator, Mapping

from moored.errors import UnknownNameError, close_match_hint


class Registry(Mapping[str, str]):
    """Lazy name -> object table for one kind of thing, e.g. environments."""

    def __init__(self, kind: str, paths: Mapping[str, str]) -> None:
        self.kind = kind
        self._paths = dict(paths)

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def check(self, name: str) -> str:
        """Return a registered name or a `"module:attribute"` as it is; imports nothing."""
        if name not in self._paths and ":" not in name:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; {close_match_hint(name, self._paths)} "
                f"(or give 'module:attribute')"
            )
        return name

    def get_object(self, name: str) -> object:
        """Import and return what `name` (or `"module:attribute"`) stands for."""
        return import_object(self._paths.get(self.check(name), name), kind=self.kind)


def import_object(path: str, *, kind: str = "object") -> object:
    """Import `"package.module:attribute"`; errors say which half is wrong."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UnknownNameError(f"{kind} path {path!r} must look like 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UnknownNameError(
            f"{kind} path {path!r}: {_import_problem(module_name, error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UnknownNameError(
            f"{kind} path {path!r}: module {module_name!r} has no attribute {attribute!r}; "
            f"{close_match_hint(attribute, public)}"
        ) from None


def _import_problem(module_name: str, error: BaseException) -> str:
    """What went wrong, where, and what to do: the path, the module's own code or a dependency."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"no module named {missing!r}; check the spelling, or install the package it lives in"
        )
    advice = f"install {missing}" if missing is not None else "fix that first"
    return f"importing {module_name!r} raised {_place_of(error)}; {advice}"


def _place_of(error: BaseException) -> str:
    """`SyntaxError at my_env.py:3: invalid syntax`: the error, the last line of code, the text."""
    if isinstance(error, SyntaxError):
        file, line, text = error.filename, error.lineno, error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
        file, line, text = frame.filename, frame.lineno, " ".join(str(error).split())
    place = f" at {file}:{line}" if file else ""
    return f"{type(error).__name__}{place}: {text}"
