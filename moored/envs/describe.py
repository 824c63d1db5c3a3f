"""What an environment's class says about itself: for `moored envs` and the documentation pages.

All of it is read from the class: its docstring, its keyword options and, if need be, an instance.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moored.envs import ENVIRONMENTS
from moored.envs.mix import REQUIRED, make_env, option_defaults
from moored.errors import EnvError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvInfo:
    """One environment in words."""

    name: str
    summary: str
    """First sentence of the docstring."""
    doc: str
    """The whole docstring."""
    reward: str
    """First sentence after `Reward:`; without one, first sentence of the second paragraph."""
    extras: tuple[str, ...]
    """Installs that it, or one of its options, needs, such as `moored[images]`."""
    max_turns: int | None
    """None where a server decides."""
    is_stochastic: bool | None
    options: Mapping[str, object]
    """Keyword options and their defaults; `REQUIRED` for one without."""

    @property
    def can_be_played(self) -> bool:
        """False when an option has to be given, such as the address of a server."""
        return all(default is not REQUIRED for default in self.options.values())


def describe_env(name: str) -> EnvInfo:
    """Describe a registered environment, or one given as `"module:Class"`."""
    cls = ENVIRONMENTS.get_object(name)
    doc = inspect.getdoc(cls) if inspect.isclass(cls) else None
    if not inspect.isclass(cls) or not doc:
        raise EnvError(f"{name} must be a class with a docstring to be described")
    defaults = option_defaults(cls)
    first_line, _, rest = doc.partition("\n")
    return EnvInfo(
        name=name,
        summary=_first_sentence(first_line) + ".",
        doc=doc,
        reward=_first_sentence(doc.partition("Reward:")[2] or rest),
        extras=tuple(sorted(set(re.findall(r"moored\[\w+\]", doc)))),
        max_turns=_fact("max_turns", name, cls, defaults),
        is_stochastic=_fact("is_stochastic", name, cls, defaults),
        options=defaults,
    )


def playable_names() -> list[str]:
    """Registered environments that need no option, such as the address of a server."""
    return [name for name in ENVIRONMENTS if describe_env(name).can_be_played]


def _fact(key: str, name: str, cls: type, defaults: Mapping[str, object]) -> Any:
    """An option's default, else what the class sets, else what an instance does.

    An instance comes last because some cannot be made without their packages.
    """
    if key in defaults:
        return defaults[key]
    if isinstance(vars(cls).get(key), property) and REQUIRED in defaults.values():
        return None
    return vars(cls)[key] if key in vars(cls) else getattr(make_env(name), key)


def _first_sentence(text: str) -> str:
    """Up to the first full stop before white space or the end, in the first paragraph."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z−`])", paragraph, maxsplit=1)[0].removesuffix(".")
