"""From a configuration to an `Engine`. Nothing heavy is imported until an engine is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from moored.errors import MooredError, UnknownNameError
from moored.names import ENGINES

if TYPE_CHECKING:
    from moored.config import Config
    from moored.engine.base import Engine


class MakeEngine(Protocol):
    """What `engine.kind` names: a class or function that makes an engine."""

    def __call__(self, config: Config, *, trains: bool) -> Engine: ...


def build_engine(config: Config, *, trains: bool = True) -> Engine:
    """The engine of a run; `trains=False` leaves out what only updates need, e.g. a critic."""
    kind = config.engine.kind
    try:
        make = cast(MakeEngine, ENGINES.get_object(kind))
    except UnknownNameError as error:
        missing = error.__cause__
        if kind not in ENGINES or not isinstance(missing, ModuleNotFoundError):
            raise
        raise MooredError(
            f"engine {kind!r} needs a package that is missing ({missing}); run: "
            f"pip install 'moored[train]'"
        ) from error
    return make(config, trains=trains)
