"""Environments from configuration: one by name and options, or several mixed by weight.

`make_env("sokoban", max_turns=8)` builds one. `EnvMix` takes what a configuration says under `env:`
and says which environment each group of a run uses.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from moored.envs import ENVIRONMENTS
from moored.envs.base import Environment, check_available
from moored.envs.option_types import MISFIT, annotations_of, describe_kind, fit_value
from moored.envs.resources import SharedResources
from moored.errors import ConfigError, EnvError, MooredError, close_match_hint, describe_raised
from moored.names import split_path

if TYPE_CHECKING:
    from moored.config import EnvConfig

EnvSource = str | Callable[..., object]
"""A registered name, `"module:Class"`, a class, or a function that makes an environment. Some
registered names may be followed by the value of their main option: `"textarena:TicTacToe-v0"`."""

REQUIRED = inspect.Parameter.empty
"""Stands for the default of an option that has none."""

IMPORTING = ("verifiers",)
"""Registered environments that import packages of others by their plain names."""

# 2**64 divided by the golden ratio: the multiples of this number modulo 2**64 spread evenly over
# any stretch of indices (Weyl sequence).
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 1 << 64
# module:attribute in any option, but not the colons of an address: http://localhost:8000.
_NAMES_CODE = re.compile(r":(?!//|[0-9])")


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword option of an environment."""

    default: object
    """`REQUIRED` when it has none."""
    kind: object
    """Its annotation; without one the type of its default, or `object`."""


def make_env(source: EnvSource, /, **options: object) -> Environment:
    """Build an environment: `make_env("sokoban", max_turns=8)`, `make_env("my_pkg.env:MyEnv")`."""
    env = env_maker(source, options)()
    if not isinstance(env, Environment):
        members = ("name", "is_stochastic", "max_turns", "reset", "step", "oracle", "close")
        missing = ", ".join(member for member in members if not hasattr(env, member))
        raise EnvError(
            f"{source_name(source)} made a {type(env).__name__}, which is not an environment: it "
            f"lacks {missing}"
        )
    return env


@contextmanager
def open_env(source: EnvSource, /, **options: object) -> Iterator[Environment]:
    """An environment with its resources, for one block; all of it is closed at the end."""
    with closing(SharedResources()) as resources, ExitStack() as stack:
        with in_a_sentence(source_name(source)):
            env = make_env(source, **options)
            stack.callback(env.close)
            check_available(env)
        resources.attach(env)
        yield env


@contextmanager
def in_a_sentence(name: str) -> Iterator[None]:
    """What an environment's own code raises before a run, for the user to read."""
    try:
        yield
    except (MooredError, ImportError):
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(f"{name} {describe_raised(error)}") from error


def env_maker(source: EnvSource, options: Mapping[str, object]) -> Callable[[], object]:
    """A function that builds `source`; the options' names and kinds are checked here and now."""
    factory, options = resolve_source(source, options)
    name = source_name(source)
    if not callable(factory):
        raise EnvError(
            f"an environment is made from a class or function, got {type(factory).__name__} "
            f"({name}); give the class itself, or a function that returns an instance"
        )
    known = options_of(factory)
    for option in options:
        if option not in known:
            raise ConfigError(f"{name} has no option {option!r}; {_option_hint(option, known)}")
    missing = [key for key, o in known.items() if o.default is REQUIRED and key not in options]
    if missing:
        raise ConfigError(f"{name} needs the option {missing[0]!r}; give it a value")
    fitted = {key: _fit(name, key, value, known[key].kind) for key, value in options.items()}
    return functools.partial(_construct, factory, fitted)


def resolve_source(
    source: EnvSource, options: Mapping[str, object]
) -> tuple[object, Mapping[str, object]]:
    """What makes `source`, and its options; `textarena:ID` is `textarena` with the option `id`."""
    if not isinstance(source, str):
        return source, options
    name, _, value = source.partition(":")
    is_registered = bool(value) and name in ENVIRONMENTS
    factory = ENVIRONMENTS.get_object(name if is_registered else source)
    option = getattr(factory, "main_option", "") if is_registered else ""
    if not is_registered:
        return factory, options
    if not option:
        raise ConfigError(f"{source}: {name} takes nothing after its name; write {name!r}")
    if option in options:
        raise ConfigError(
            f"{source}: the part after {name}: is the option {option!r}, which is given as "
            f"{options[option]!r} too; give it once"
        )
    return factory, {option: value, **options}


def options_of(factory: Callable[..., object]) -> dict[str, Option]:
    """Keyword options of a class or function, base classes' included."""
    if not inspect.isclass(factory):
        return _keywords(factory)[0]
    found: dict[str, Option] = {}
    for cls in factory.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        options, passes_on = _keywords(cls.__init__)
        found |= {name: option for name, option in options.items() if name not in found}
        if not passes_on:
            break
    return found


def option_defaults(factory: Callable[..., object]) -> dict[str, object]:
    """Keyword options and their defaults, `REQUIRED` for none."""
    return {name: option.default for name, option in options_of(factory).items()}


def source_name(source: object) -> str:
    """How messages call an environment source."""
    return source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))


def is_foreign(source: str, options: Mapping[str, object]) -> bool:
    """True where building it may run code that is not in moored and that its words name."""
    name, _, value = ENVIRONMENTS.check(source).partition(":")
    if name not in ENVIRONMENTS or name in IMPORTING:
        return True
    return any(_NAMES_CODE.search(text) for text in _texts([value, options]))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _keywords(function: Callable[..., object]) -> tuple[dict[str, Option], bool]:
    """Named parameters, and whether `**kwargs` passes others on."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    kinds = annotations_of(function)
    options = {
        p.name: Option(p.default, kinds.get(p.name, object)) for p in parameters if p.kind in named
    }
    return options, passes_on


def _fit(name: str, option: str, value: object, kind: object) -> object:
    fitted = fit_value(value, kind)
    if fitted is MISFIT:
        raise ConfigError(
            f"{name}: option {option!r} must be {describe_kind(kind)}, got {value!r:.80}"
        )
    return fitted


def _option_hint(option: str, known: Mapping[str, object]) -> str:
    return close_match_hint(option, known) if known else "it takes no options"


def _construct(factory: Callable[..., object], options: dict[str, object]) -> object:
    try:
        return factory(**options)
    except TypeError as error:
        # Most often an option of the wrong type that has no annotation.
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise EnvError(f"{source_name(factory)} cannot be made with {given}: {error}") from error


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of which several are the same get numbers: sokoban#1, sokoban#2."""
    counted = [names[: place + 1].count(name) for place, name in enumerate(names)]
    pairs = zip(names, counted, strict=True)
    return tuple(f"{name}#{k}" if names.count(name) > 1 else name for name, k in pairs)


def _without_folder(name: str) -> str:
    """`my_env.py:MyEnv`, wherever that file lies."""
    return os.path.basename(name) if ".py:" in name else name


class EnvMix:
    """Environments mixed by weight. The same name may appear twice, with other options."""

    def __init__(self, specs: Sequence[EnvConfig]) -> None:
        self.specs = tuple(specs)
        self.makers = tuple(functools.partial(make_env, s.name, **s.options) for s in specs)
        """What builds each of `specs`; a pool of environments tells them apart by it."""
        self.names = _distinct([_without_folder(spec.name) for spec in specs])
        """What each of `specs` is called in records: its name, numbered where two have the same."""

    def index_of_group(self, group: int, *, seed: int = 0) -> int:
        """Which of `specs` the `group`-th group of a run uses, a function of its arguments alone.

        Any stretch of n groups in a row holds an entry n · weight / total times, give or take a
        few, so every training step sees the mix, and a resumed run goes on where it stopped.
        """
        total = math.fsum(spec.weight for spec in self.specs)
        bounds = list(accumulate(spec.weight / total for spec in self.specs))
        offset = random.Random(seed).getrandbits(64)
        position = (offset + group * _GOLDEN) % _WORD / _WORD
        return min(bisect_right(bounds, position), len(self.specs) - 1)

    def fewest_groups(self, count: int, *, seed: int = 0) -> list[int]:
        """How many groups each of `specs` has at least in `count` groups in a row.

        The least of a thousand stretches, so that a step with fewer is rare.
        """
        found = [self.index_of_group(group, seed=seed) for group in range(1000 + count)]
        stretches = [found[start : start + count] for start in range(1000)]
        return [min(part.count(entry) for part in stretches) for entry in range(len(self.specs))]

    def check(self, *, foreign: bool = True) -> None:
        """Build every environment once, and raise what says that its episodes cannot begin.

        Without `foreign`, the code that a configuration names is neither imported nor run: of such
        environments only the words are checked.
        """
        for spec, name, make in zip(self.specs, self.names, self.makers, strict=True):
            if not foreign and is_foreign(spec.name, spec.options):
                if spec.name.partition(":")[0] in ENVIRONMENTS:
                    env_maker(spec.name, spec.options)
                else:
                    split_path(spec.name, kind="environment")
                continue
            with in_a_sentence(name), closing(make()) as env:
                check_available(env)
