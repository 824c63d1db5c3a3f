"""What a study is: a base, factors with arms, seeds, and what to report; read from YAML.

Base and arms are lists of words as `moored train` takes them: presets, files, `key=value`. Every
combination of one arm of each factor is run with every seed. Mistakes are errors that name the
line. A study may also run nothing itself and analyse the runs of others (`analysis`, `of`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moored.analysis.study_table import DEFAULT_FIGURES, FIGURES
from moored.errors import ConfigError, close_match_hint
from moored.presets import HERE
from moored.studies.located import Located, read_located

STUDIES = HERE / "studies"
KEYS = (
    *("question", "paper", "base", "factors", "seeds", "report", "against"),
    *("seconds_per_step", "analysis", "of"),
)
ANALYSES = ("correlation",)
MAX_SEEDS = 1000
TOO_MANY = f"more than {MAX_SEEDS} seeds, counted from 0; one seed, such as 7, is written"
"""A larger count is meant as the one seed to run."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
"""Arms are names of folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A preset, a file or `key=value`, and where it stands."""

    text: str
    source: Located | None = None
    """None: it was given on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One level of a factor."""

    name: str
    words: tuple[Word, ...]
    source: Located


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What is varied, and its levels."""

    name: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A declared study."""

    name: str
    source: Located
    question: str
    paper: str = ""
    """What the paper found."""
    base: tuple[Word, ...] = ()
    factors: tuple[Factor, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    report: tuple[str, ...] = DEFAULT_FIGURES
    against: tuple[str, str] | None = None
    """A factor and the arm of it that the others are compared with, seed by seed."""
    seconds_per_step: float | None = None
    """Measured on one core, for the estimate of `--plan`."""
    of: tuple[str, ...] = ()
    """Studies whose runs are analysed; of a study that runs nothing itself."""

    @property
    def is_analysis(self) -> bool:
        return bool(self.of)

    @property
    def is_shipped(self) -> bool:
        """It is one of the package's, not a file of the user's."""
        return self.source.file.parent == STUDIES


def study_names() -> list[str]:
    """Every study that ships with the package."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def describe_studies() -> dict[str, str]:
    """The question of each study."""
    return {name: read_study(name).question for name in study_names()}


def read_study(name: str) -> Study:
    """A study by its name, or one of the user's own from a YAML file."""
    if name in study_names():
        file = STUDIES / f"{name}.yaml"
    else:
        file = Path(name)
        if not file.is_file():
            hint = close_match_hint(file.stem, study_names())
            raise ConfigError(f"unknown study {name!r}; {hint} (or give a .yaml file)")
    data = read_located(file)
    entries = data.items("a study")
    _refuse_unknown("key", entries, KEYS)
    if "question" not in entries:
        raise data.error("'question' is missing: say in one line what the study asks")
    common: dict[str, Any] = {
        "name": file.stem,
        "source": data,
        "question": entries["question"].as_kind(str, "question").strip(),
        "paper": entries["paper"].as_kind(str, "paper").strip() if "paper" in entries else "",
    }
    if "analysis" in entries:
        return Study(**common, of=_analysed(entries))
    return _grid(common, entries, data)


def _grid(common: Mapping[str, Any], entries: Mapping[str, Located], data: Located) -> Study:
    for needed in ("base", "factors"):
        if needed not in entries:
            raise data.error(f"{needed!r} is missing; see docs/studies.md for an example")
    factors = tuple(_factor(*item) for item in entries["factors"].items("factors").items())
    if not factors:
        raise entries["factors"].error("a study needs at least one factor with its arms")
    found: dict[str, Any] = {"base": _words(entries["base"], "base"), "factors": factors}
    if "seeds" in entries:
        found["seeds"] = _seeds(entries["seeds"])
    if "report" in entries:
        found["report"] = _report(entries["report"])
    if "against" in entries:
        found["against"] = _against(entries["against"], factors)
    if "seconds_per_step" in entries:
        value = entries["seconds_per_step"].value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise entries["seconds_per_step"].error(f"seconds_per_step must be > 0, got {value!r}")
        found["seconds_per_step"] = float(value)
    return Study(**common, **found)


def _analysed(entries: Mapping[str, Located]) -> tuple[str, ...]:
    name = entries["analysis"].as_kind(str, "analysis")
    if name not in ANALYSES:
        raise entries["analysis"].error(
            f"unknown analysis {name!r}; {close_match_hint(name, ANALYSES)}"
        )
    for key in ("base", "factors", "seeds"):
        if key in entries:
            raise entries[key].error(f"{key!r} is not for an analysis, which runs nothing itself")
    if "of" not in entries:
        raise entries["analysis"].error("'of' is missing: list the studies to analyse")
    return tuple(item.as_kind(str, "a study") for item in entries["of"].as_kind(list, "of"))


def _factor(name: str, source: Located) -> Factor:
    _check_name("factor", name, source)
    arms = tuple(
        Arm(name=arm, words=_words(words, f"arm {arm!r}"), source=words)
        for arm, words in source.items(f"factor {name!r}").items()
    )
    if not arms:
        raise source.error(f"factor {name!r} needs at least one arm")
    for arm in arms:
        _check_name("arm", arm.name, arm.source)
    _refuse_same_folder(arms)
    return Factor(name=name, arms=arms)


def _check_name(kind: str, name: str, source: Located) -> None:
    if not FOLDER_NAME.fullmatch(name):
        raise source.error(
            f"{kind} {name!r} becomes the name of a folder; use letters, digits and _ . + -"
        )


def _refuse_same_folder(arms: Sequence[Arm]) -> None:
    """Names that differ in capitals only are one folder on some disks."""
    seen: dict[str, Arm] = {}
    for arm in arms:
        other = seen.setdefault(arm.name.lower(), arm)
        if other is not arm:
            raise arm.source.error(
                f"arms {other.name!r} and {arm.name!r} differ in capitals only; rename one"
            )


def _words(source: Located, what: str) -> tuple[Word, ...]:
    """A list of words, or a string of them as on a command line."""
    if source.value is None:
        return ()
    if isinstance(source.value, str):
        return tuple(Word(text=text, source=source) for text in shlex.split(source.value))
    items = source.as_kind(list, f"{what}, presets and key=value,")
    words = tuple(Word(text=item.as_kind(str, f"a word of {what}"), source=item) for item in items)
    for word in words:
        if word.text.partition("=")[0].strip() == "seed" and word.source is not None:
            raise word.source.error("a study sets the seed itself; use 'seeds' or --seeds")
    return words


def _seeds(source: Located) -> tuple[int, ...]:
    if isinstance(source.value, list):
        seeds = tuple(item.as_kind(int, "a seed") for item in source.value)
    else:
        count = source.as_kind(int, "seeds")
        if count > MAX_SEEDS:
            raise source.error(f"seeds: {count} are {TOO_MANY}: [7]")
        seeds = tuple(range(count))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise source.error("seeds must be a count >= 1 or a list of different seeds >= 0")
    return seeds


def _report(source: Located) -> tuple[str, ...]:
    names = {item.as_kind(str, "a figure"): item for item in source.as_kind(list, "report")}
    _refuse_unknown("figure", names, FIGURES)
    return tuple(names)


def _against(source: Located, factors: Sequence[Factor]) -> tuple[str, str]:
    entries = source.items("against")
    if len(entries) != 1:
        raise source.error("'against' takes one factor and one of its arms")
    _refuse_unknown("factor", entries, [factor.name for factor in factors])
    ((name, arm),) = entries.items()
    (factor,) = (factor for factor in factors if factor.name == name)
    given = str(arm.value)
    if given not in [known.name for known in factor.arms]:
        hint = close_match_hint(given, [known.name for known in factor.arms])
        raise arm.error(f"factor {name!r} has no arm {given!r}; {hint}")
    return name, given


def _refuse_unknown(kind: str, given: Mapping[str, Located], known: Iterable[str]) -> None:
    for name, source in given.items():
        if name not in known:
            raise source.error(f"unknown {kind} {name!r}; {close_match_hint(name, known)}")


def parse_seeds(text: str) -> tuple[int, ...]:
    """`5` is seeds 0 to 4, `4-8` and `1,3` are those seeds."""
    try:
        seeds = _seeds_of(text)
    except ValueError:
        seeds = ()
    if seeds[MAX_SEEDS:]:
        raise ConfigError(f"--seeds {text} are {TOO_MANY}: 7-7")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"--seeds takes a count (5), a range (4-8) or a list (1,3), got {text!r}")
    return tuple(seeds)


def _seeds_of(text: str) -> Sequence[int]:
    if text.isdecimal():
        return range(int(text))
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        return range(int(match[1]), int(match[2]) + 1)
    return [int(part) for part in text.split(",")]


def restricted(study: Study, choices: Sequence[str]) -> Study:
    """The study with fewer arms: `filter=none,top_p` keeps two arms of the factor `filter`."""
    for choice in choices:
        name, sign, arms = choice.partition("=")
        known = [factor.name for factor in study.factors]
        if not sign or name not in known:
            hint = close_match_hint(name, known)
            raise ConfigError(f"--only {choice}: no factor is called {name!r}; {hint}")
        factors = [
            _with_arms(factor, arms.split(",")) if factor.name == name else factor
            for factor in study.factors
        ]
        study = replace(study, factors=tuple(factors))
    return study


def _with_arms(factor: Factor, names: Sequence[str]) -> Factor:
    known = {arm.name: arm for arm in factor.arms}
    for name in names:
        if name not in known:
            hint = close_match_hint(name, known)
            raise ConfigError(f"--only: factor {factor.name!r} has no arm {name!r}; {hint}")
    return replace(factor, arms=tuple(known[name] for name in dict.fromkeys(names)))
