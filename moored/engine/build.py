"""From a configuration to an `Engine`. Nothing heavy is imported until an engine is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from moored.errors import MooredError
from moored.registry import Registry

if TYPE_CHECKING:
    from moored.config import Config
    from moored.engine.base import Engine


class MakeEngine(Protocol):
    """What `engine.kind` names: a class or function that makes an engine."""

    def __call__(self, config: Config, *, trains: bool) -> Engine: ...


ENGINES = Registry(
    "engine",
    {
        "local": "moored.engine.local.engine:LocalEngine",
        "endpoint": "moored.engine.endpoint.engine:EndpointEngine",
    },
)


def build_engine(config: Config, *, trains: bool = True) -> Engine:
    """The engine of a run; `trains=False` leaves out what only updates need, e.g. a critic."""
    try:
        make = cast(MakeEngine, ENGINES.get_object(config.engine.kind))
    except ImportError as error:
        raise MooredError(
            f"engine {config.engine.kind!r} needs packages that are missing ({error}); run: "
            f"pip install 'moored[train]'"
        ) from error
    return make(config, trains=trains)
