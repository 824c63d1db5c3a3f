"""What a study is, read from YAML, and its runs: every combination of arms with every seed.

Base and arms are lists of words as `moored train` takes them: presets, files, `key=value`. A study
may also run nothing itself and analyse the runs of others (`analysis`, `of`).
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from moored.analysis.study_table import DEFAULT_FIGURES, FIGURES
from moored.errors import ConfigError, MooredError, close_match_hint
from moored.presets import HERE

if TYPE_CHECKING:
    from moored.config import Config

STUDIES = HERE / "studies"
MAX_SEEDS = 1000
"""A larger count is meant as the one seed to run."""


def parse_seeds(text: str) -> tuple[int, ...]:
    """`5` is seeds 0 to 4, `4-8` and `1,3` are those seeds."""
    try:
        if text.isdecimal():
            seeds: Sequence[int] = range(int(text))
        elif match := re.fullmatch(r"(\d+)-(\d+)", text):
            seeds = range(int(match[1]), int(match[2]) + 1)
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = ()
    if seeds[MAX_SEEDS:]:
        raise ConfigError(
            f"seeds {text} are more than {MAX_SEEDS}, counted from 0; one seed, such as 7, is "
            f"written 7-7, in a YAML file [7]"
        )
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds are a count (5), a range (4-8) or a list (1,3), got {text!r}")
    return tuple(seeds)


def _listed(words: object) -> object:
    """A string of words, as on a command line, as a list."""
    return shlex.split(words) if isinstance(words, str) else words


def _seeds(given: object) -> object:
    return parse_seeds(given) if isinstance(given, str) else given


def _pair(given: object) -> object:
    """`{filter: none}` as a factor and its arm."""
    (pair,) = given.items() if isinstance(given, Mapping) and len(given) == 1 else [given]
    return pair


FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Arms = Annotated[dict[FolderName, Words], Field(min_length=1)]


class Study(BaseModel, extra="forbid", frozen=True, str_strip_whitespace=True):
    """A declared study."""

    name: str
    question: str = ""
    paper: str = ""
    """What the paper found."""
    base: Words = ()
    factors: dict[FolderName, Arms] = {}
    """What is varied -> its levels -> the words of each."""
    seeds: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_seeds)] = (0, 1, 2)
    report: tuple[str, ...] = DEFAULT_FIGURES
    against: Annotated[tuple[str, str] | None, BeforeValidator(_pair)] = None
    """A factor and the arm of it that the others are compared with, seed by seed."""
    seconds_per_step: PositiveFloat | None = None
    """Measured on one core, for the estimate of `--plan`."""
    analysis: Literal["correlation"] | None = None
    of: tuple[str, ...] = ()
    """Studies whose runs are analysed; of a study that runs nothing itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.question:
            raise ValueError("'question' is missing: say in one line what the study asks")
        needed = "of" if self.analysis else "factors"
        if not getattr(self, needed):
            raise ValueError(f"{needed!r} is missing; see docs/studies.md for an example")
        if len(set(self.seeds)) < max(len(self.seeds), 1):
            raise ValueError("seeds must be a count or a list of different seeds")
        for figure in self.report:
            if figure not in FIGURES:
                raise ValueError(f"unknown figure {figure!r}; {close_match_hint(figure, FIGURES)}")
        if self.against is not None:
            _check_arm(self, *self.against)
        return self


def _check_arm(study: Study, factor: str, arm: str) -> None:
    if factor not in study.factors:
        hint = close_match_hint(factor, study.factors)
        raise ConfigError(f"no factor is called {factor!r}; {hint}")
    if arm not in (arms := study.factors[factor]):
        raise ConfigError(f"factor {factor!r} has no arm {arm!r}; {close_match_hint(arm, arms)}")


def study_names() -> list[str]:
    """Every study that ships with the package."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def read_study(name: str) -> Study:
    """A study by its name, or one of the user's own from a YAML file."""
    file = STUDIES / f"{name}.yaml" if name in study_names() else Path(name)
    if not file.is_file():
        hint = close_match_hint(file.stem, study_names())
        raise ConfigError(f"unknown study {name!r}; {hint} (or give a .yaml file)")
    try:
        # Values as they are written: `0.9` and `off` are names of arms, not a number and a switch.
        given = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        return Study.model_validate({**(given or {}), "name": file.stem})
    except ValidationError as error:
        problem = "; ".join(map(_sentence, error.errors()))
    except (TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = f"it is not a study in YAML: {' '.join(str(error).split())}"
    raise ConfigError(f"{str(file)!r}: {problem}")


def _sentence(item: ErrorDetails) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {close_match_hint(key, Study.model_fields)}"
    return f"{key}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")


def restricted(study: Study, choices: Sequence[str]) -> Study:
    """The study with fewer arms: `filter=none,top_p` keeps two arms of the factor `filter`."""
    factors = dict(study.factors)
    for choice in choices:
        name, _, chosen = choice.partition("=")
        arms = list(dict.fromkeys(chosen.split(",")))
        for arm in arms:
            _check_arm(study, name, arm)
        factors[name] = {arm: study.factors[name][arm] for arm in arms}
    return study.model_copy(update={"factors": factors})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a study."""

    arms: tuple[str, ...]
    """One of each factor."""
    seed: int
    words: tuple[str, ...]
    """What `moored train` is given."""
    config: Config

    @property
    def name(self) -> str:
        """Its folder inside the study's."""
        return "/".join([*self.arms, f"seed-{self.seed}"])

    @property
    def label(self) -> str:
        return " ".join(self.arms)


def plan_runs(
    study: Study, overrides: Sequence[str] = (), check: Callable[[Config], None] | None = None
) -> list[PlannedRun]:
    """All runs, arm by arm; raises for the first combination of arms that cannot run.

    `check` refuses configurations that could not run; it is called once for equal environments,
    models and sinks.
    """
    from moored.config import load_config
    from moored.models.paths import resolve_paths
    from moored.models.rates import with_rates
    from moored.presets import read_presets

    seen: set[str] = set()
    runs = []
    for arms in itertools.product(*(arms.items() for arms in study.factors.values())):
        names = tuple(name for name, _ in arms)
        words = [*study.base, *(word for _, of_arm in arms for word in of_arm), *overrides]
        if any(word.partition("=")[0].strip() == "seed" for word in words):
            raise ConfigError("a study sets the seed itself; use 'seeds' or --seeds")
        presets = [word for word in words if "=" not in word]
        options = [word for word in words if "=" in word]
        try:
            config = with_rates(load_config(read_presets(presets), options))
            key = json.dumps([config.model_dump(mode="json")[k] for k in ("env", "model", "log")])
            if check is not None and key not in seen:
                check(config)
                seen.add(key)
        except MooredError as error:
            raise ConfigError(f"arm {' '.join(names)!r} cannot run: {error}") from None
        config = resolve_paths(config)
        runs += [
            PlannedRun(
                arms=names,
                seed=seed,
                # Presets first, as `moored train` reads them.
                words=(*presets, *options, f"seed={seed}"),
                config=config.model_copy(update={"seed": seed}),
            )
            for seed in study.seeds
        ]
    return runs
