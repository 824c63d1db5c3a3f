"""Names to objects, imported only when asked for.

A registry maps short names to `"module:attribute"` strings. `get` also takes such a string
directly, so user code needs no registration.
"""

from __future__ import annotations

import importlib
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

    def get_object(self, name: str) -> object:
        """Import and return what `name` (or `"module:attribute"`) stands for."""
        path = self._paths.get(name)
        if path is None and ":" not in name:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; {close_match_hint(name, self._paths)} "
                f"(or give 'module:attribute')"
            )
        return import_object(path or name, kind=self.kind)


def import_object(path: str, *, kind: str = "object") -> object:
    """Import `"package.module:attribute"`; errors say which half is wrong."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UnknownNameError(f"{kind} path {path!r} must look like 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing dependency *inside* the module is that module's error, not a wrong path.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UnknownNameError(
            f"{kind} path {path!r}: no module named {error.name!r}; "
            f"check the spelling, or install the package it lives in"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UnknownNameError(
            f"{kind} path {path!r}: module {module_name!r} has no attribute {attribute!r}; "
            f"{close_match_hint(attribute, public)}"
        ) from None
