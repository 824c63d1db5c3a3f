"""Which model scores which step: a run's own checkpoints, a trainer's, or one for all.

A step is best scored by the weights that wrote it: those of the checkpoint of the step before. An
earlier one comes close; one late model makes early steps look collapsed when training ruined it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moored.errors import ConfigError, MooredError
from moored.files.tables import is_run

if TYPE_CHECKING:
    from moored.analysis.scorers import Scorer, Scorers
    from moored.config import Config

STEP = "{step}"
START = "the model the run started from"


@dataclass(frozen=True, slots=True)
class Device:
    """Where a local model runs."""

    device: str = "auto"
    dtype: str = "auto"


def find_run(paths: Sequence[Path]) -> Path | None:
    """The run directory that all paths belong to: itself, or files of its rollouts."""
    runs = {_run_of(path) for path in paths}
    return runs.pop() if len(runs) == 1 else None


def _run_of(path: Path) -> Path | None:
    folders = (path,) if path.is_dir() else ()
    places = (*folders, *path.absolute().parents[:2])
    return next((place for place in places if is_run(place)), None)


def read_run_config(run: Path) -> Config:
    from moored.config import load_config

    return load_config(run / "config.yaml")


def run_scorers(run: Path, temperature: float, where: Device) -> Scorers:
    """The models a run kept: its start, its checkpoints, or else what it ended with."""
    from moored.analysis.scorers import Scorers, local_scorer

    config, ended = read_run_config(run), run / "model"
    saved = {_number(folder): folder for folder in sorted((run / "checkpoints").glob("step_*"))}
    lora = config.optimizer.lora_rank
    has_model = (ended / "config.json").is_file()
    base = str(ended) if has_model and not lora else config.model
    options = {"lora_rank": lora, "lora_alpha": config.optimizer.lora_alpha} if lora else {}
    make = partial(local_scorer, device=where.device, dtype=where.dtype, temperature=temperature)
    if not saved:
        if not has_model:
            raise MooredError(
                f"{str(run)!r} has neither a checkpoint nor a model yet; let it run further, or "
                f"name a model: --model FOLDER"
            )
        return Scorers.single(make(str(ended)), temperature)

    # The weights saved after a step wrote the rollouts of the next one, or with a lag of the one
    # after that.
    later = 1 + config.rollout.max_lag

    def load(first_step: int | None) -> Scorer:
        assert first_step is not None
        if first_step == 1:
            return make(config.model, shown=START)
        saved_at = first_step - later
        shown = f"checkpoint {saved_at}"
        return make(base, lora=options, weights=saved[saved_at], shown=shown)

    steps = (*((1,) if _exists(config.model) else ()), *(step + later for step in saved))
    shown = [START if step == 1 else f"checkpoint {step - later}" for step in steps]
    return Scorers(f"the nearest of {', '.join(shown)}", temperature, load, steps)


def model_scorers(name: str, temperature: float, where: Device) -> Scorers:
    """A model by name; with `{step}` in it, a folder of each checkpoint."""
    from moored.analysis.scorers import Scorers, local_scorer

    make = partial(local_scorer, device=where.device, dtype=where.dtype, temperature=temperature)
    if STEP not in name:
        return Scorers.single(make(name), temperature)
    folders = find_checkpoints(name)
    if not folders:
        raise ConfigError(
            f"no folder is called {name!r} with a number for {STEP}; check the path, or give one "
            f"model for all steps"
        )

    def load(step: int | None) -> Scorer:
        assert step is not None
        return make(folders[step])

    shown = f"the nearest of {len(folders)} checkpoints, {name}"
    return Scorers(shown, temperature, load, tuple(folders))


def find_checkpoints(pattern: str) -> dict[int, str]:
    """Step -> folder of a pattern such as `out/checkpoint-{step}`."""
    before, _, after = pattern.partition(STEP)
    found = {}
    for folder in glob.glob(f"{glob.escape(before)}*{glob.escape(after)}"):
        number = re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}", folder)
        if number and Path(folder).is_dir():
            found[int(number[1])] = folder
    return dict(sorted(found.items()))


def guess_model(paths: Sequence[Path]) -> str:
    """A trainer's checkpoints beside its completions: `out/checkpoint-{step}`."""
    folders = {path if path.is_dir() else path.parent for path in paths}
    for folder in sorted(folders):
        for place in (folder, folder.parent):
            pattern = str(place / f"checkpoint-{STEP}")
            if find_checkpoints(pattern):
                return pattern
    raise ConfigError(
        f"name the model that wrote the rollouts: --model FOLDER or org/name, or the checkpoints "
        f"of a trainer: --model 'out/checkpoint-{STEP}'"
    )


def late_model_warning(scorers: Scorers, steps: Sequence[int]) -> str | None:
    """One line when one model scores steps that others wrote."""
    if scorers.steps or len(steps) < 2:
        return None
    return (
        f"one model scores all steps, {steps[0]} to {steps[-1]}: if training ruined it, early "
        f"steps look collapsed too; give a checkpoint for each, --model 'out/checkpoint-{STEP}'"
    )


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _exists(model: str) -> bool:
    from moored.models.find import check_model_name

    try:
        check_model_name(model)
    except MooredError:
        return False
    # A hub id may be anywhere: nothing is downloaded that the user did not ask for.
    return "/" not in model or Path(model).is_dir()
