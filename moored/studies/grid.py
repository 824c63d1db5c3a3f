"""The runs of a study: every combination of arms with every seed, checked before any is started."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moored.config_text import set_option
from moored.errors import ConfigError, MooredError
from moored.studies.declaration import Arm, Study, Word

if TYPE_CHECKING:
    from moored.config import Config


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
    """All runs, arm by arm; raises for the first mistake, with its line.

    `check` refuses configurations that could not run; it is called once for equal environments,
    models and sinks.
    """
    from moored.models.paths import resolve_paths

    given = tuple(Word(text=text) for text in overrides)
    _check_words([*study.base, *given])
    for factor in study.factors:
        for arm in factor.arms:
            _check_words(arm.words)
    seen: set[str] = set()
    runs = []
    for arms in itertools.product(*(factor.arms for factor in study.factors)):
        config = _cell_config(study, arms, given)
        key = json.dumps([config.model_dump(mode="json")[k] for k in ("env", "model", "log")])
        if check is not None and key not in seen:
            _check_cell(study, arms, config, check)
            seen.add(key)
        config = resolve_paths(config)
        words = _in_order([*study.base, *(word for arm in arms for word in arm.words), *given])
        runs += [
            PlannedRun(
                arms=tuple(arm.name for arm in arms),
                seed=seed,
                words=(*words, f"seed={seed}"),
                config=config.model_copy(update={"seed": seed}),
            )
            for seed in study.seeds
        ]
    return runs


def _check_words(words: Iterable[Word]) -> None:
    """Refuse unknown presets and keys, each at its line; values depend on the other words."""
    from moored.config import Config, unknown_options
    from moored.presets import read_presets

    for word in words:
        try:
            if "=" not in word.text:
                read_presets([word.text])
                continue
            if word.text.partition("=")[0].strip() == "seed":
                raise ConfigError("a study sets the seed itself; use --seeds")
            data = set_option({}, word.text, Config().model_dump(mode="json"))
            for problem in unknown_options(data):
                raise ConfigError(problem)
        except MooredError as error:
            raise _at(word, str(error)) from None


def _at(word: Word, problem: str) -> ConfigError:
    if word.source is None:
        return ConfigError(problem)
    return word.source.error(problem)


def _in_order(words: Iterable[Word]) -> list[str]:
    """Presets first, as `moored train` reads them."""
    texts = [word.text for word in words]
    return [t for t in texts if "=" not in t] + [t for t in texts if "=" in t]


def _load(words: Iterable[Word]) -> Config:
    from moored.config import load_config
    from moored.models.rates import with_rates
    from moored.presets import read_presets

    texts = _in_order(words)
    presets = [text for text in texts if "=" not in text]
    return with_rates(load_config(read_presets(presets), texts[len(presets) :]))


def _cell_config(study: Study, arms: Sequence[Arm], given: Sequence[Word]) -> Config:
    words = [*study.base, *(word for arm in arms for word in arm.words), *given]
    try:
        return _load(words)
    except MooredError as error:
        raise _blame(study, arms, given, str(error)) from None


def _check_cell(
    study: Study, arms: Sequence[Arm], config: Config, check: Callable[[Config], None]
) -> None:
    try:
        check(config)
    except MooredError as error:
        named = " ".join(arm.name for arm in arms)
        raise study.source.error(f"arm {named!r} cannot run: {error}") from None


def _blame(study: Study, arms: Sequence[Arm], given: Sequence[Word], problem: str) -> ConfigError:
    """The error at the base, or at the one arm that does not go with it, or of the combination."""
    if not _loads(study.base):
        source = study.source.items("a study")["base"]
        return source.error(f"base: {problem}")
    for arm in arms:
        if not _loads([*study.base, *arm.words]):
            return arm.source.error(f"arm {arm.name!r}: {problem}")
    if given and _loads([*study.base, *(word for arm in arms for word in arm.words)]):
        return ConfigError(f"{' '.join(word.text for word in given)}: {problem}")
    names = " and ".join(repr(arm.name) for arm in arms)
    return arms[-1].source.error(f"arms {names} do not go together: {problem}")


def _loads(words: Iterable[Word]) -> bool:
    try:
        _load(words)
    except MooredError:
        return False
    return True
