"""What environments share: opened once, handed to every instance, closed at the end.

An environment declares its resources in one method, `resources(self)`, that names `Resource`s.
`SharedResources` holds the open ones of a run. Two resources are the same when they compare equal,
so a `@dataclass` with the same values is opened once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from moored.envs.base import Environment, Resource
from moored.errors import EnvError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenResource:
    """A resource in use, and how many calls use it just now."""

    resource: Resource
    num_calls: int = 0

    @property
    def has_room(self) -> bool:
        limit = self.resource.max_concurrency
        return limit is None or self.num_calls < limit


@dataclass(slots=True)
class SharedResources:
    """The open resources of a run; close it when the run is over."""

    _opened: list[OpenResource] = field(default_factory=list)

    def attach(self, env: Environment) -> tuple[OpenResource, ...]:
        """Set each resource of `env` as an attribute, opened at its first use; returns them."""
        used = []
        for name, resource in resources_of(env).items():
            shared = self._find(resource) or self._open(env, name, resource)
            setattr(env, name, shared.resource)
            used.append(shared)
        return tuple(used)

    def close(self) -> None:
        """Close every resource, the newest first; one that fails is logged and loses no other."""
        opened, self._opened = self._opened, []
        with ExitStack() as stack:
            for shared in opened:
                stack.callback(_close, shared.resource)

    def _find(self, resource: Resource) -> OpenResource | None:
        kind = type(resource)
        return next(
            (x for x in self._opened if type(x.resource) is kind and x.resource == resource), None
        )

    def _open(self, env: Environment, name: str, resource: Resource) -> OpenResource:
        if resources_of(env)[name] != resource:
            raise EnvError(
                f"{env.name}: two calls of resources() gave different {name!r}, so it cannot be "
                f"shared; make {type(resource).__name__} a @dataclass of its options"
            )
        try:
            resource.open()
        except Exception as error:
            raise EnvError(
                f"{env.name}: the resource {name!r} could not be opened: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._opened.append(OpenResource(resource))
        return self._opened[-1]


def resources_of(env: Environment) -> Mapping[str, Resource]:
    """What `env` declares; nothing for an environment without a method `resources`."""
    declare = getattr(env, "resources", None)
    if declare is None:
        return {}
    found = declare()
    if not isinstance(found, Mapping) or not all(isinstance(x, Resource) for x in found.values()):
        raise EnvError(
            f"{env.name}: resources() must map names to moored.envs.Resource objects, got "
            f"{found!r:.80}"
        )
    return found


@contextmanager
def detached(env: Environment) -> Iterator[Mapping[str, object]]:
    """Take the open resources off `env` for the block, e.g. to pickle it; gives them by name."""
    held = {name: getattr(env, name) for name in resources_of(env) if hasattr(env, name)}
    for name in held:
        delattr(env, name)
    try:
        yield held
    finally:
        for name, resource in held.items():
            setattr(env, name, resource)


def _close(resource: Resource) -> None:
    try:
        resource.close()
    except Exception as error:
        logger.warning(
            "%s could not be closed: %s: %s", type(resource).__name__, type(error).__name__, error
        )
