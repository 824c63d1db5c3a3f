"""What is to be started, and where; every value that ends up in a script is checked here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from moored.errors import MooredError

EngineKind = Literal["torchrun", "ray"]
PYTHON = ("python", "-m", "moored")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
MAX_NAME = 47
"""KubeRay adds to the names of jobs, and refuses longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Equal machines."""

    nodes: int = 1
    gpus_per_node: int = 8
    """0: processors only."""
    cpus_per_node: int | None = None
    """None: what the cluster gives by default."""

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU."""
        return max(1, self.gpus_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`moored train` with some configuration, on some machines."""

    name: str
    words: tuple[str, ...]
    """Presets, files and options, as on the command line."""
    run: str
    """The run directory."""
    engine: EngineKind
    resources: Resources

    def command(self) -> list[str]:
        """What `moored` is asked to do."""
        options = [f"engine.kind={self.engine}"]
        if self.engine == "ray":
            options.append("engine.ray.address=auto")
        return ["train", *self.words, *options, "--run", self.run]

    def resume_command(self) -> list[str]:
        return ["train", "--resume", self.run]


def check_name(what: str, name: str) -> str:
    """A name that Slurm, Ray and Kubernetes all take."""
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise MooredError(
            f"{what} must be lower-case letters, digits and '-', at most {MAX_NAME} of them, and "
            f"begin and end with a letter or digit; got {name!r}"
        )
    return name


def check_value(what: str, value: str, pattern: str, example: str) -> str:
    """A value of a line that cannot be quoted, such as `#SBATCH --time=`."""
    if not re.fullmatch(pattern, value):
        raise MooredError(f"{what} cannot be {value!r}; give something like {example}")
    return value


def check_words(words: Sequence[str], *, for_shell: bool) -> None:
    """Refuse what a script cannot hold; without a shell's quotes also what would need them.

    `ray job submit` and KubeRay hand a command line to a shell of the cluster without quoting it.
    """
    for word in words:
        if any(not letter.isprintable() for letter in word):
            raise MooredError(f"{word!r} has a control character, which a job cannot be given")
        if not for_shell and shlex.quote(word) != word:
            raise MooredError(
                f"{word!r} has characters that a shell of the cluster would read as its own; put "
                f"the option into a YAML file, and rename a path"
            )


def check_shared_path(path: str) -> str:
    """A run directory that every node sees under the same path."""
    if not PurePosixPath(path).is_absolute():
        raise MooredError(
            f"--run {path!r} is relative, but the job runs in a folder of its own on the cluster; "
            f"give an absolute path that all nodes see"
        )
    return path


def default_name(words: Sequence[str]) -> str:
    """From presets and files: `sokoban grpo` is `sokoban-grpo`."""
    presets = [PurePosixPath(word).name for word in words if "=" not in word]
    presets = [preset.removesuffix(".yaml").removesuffix(".yml") for preset in presets]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(presets).lower()).strip("-")
    return name[:MAX_NAME].strip("-") or "moored"
