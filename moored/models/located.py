"""Relative paths in the options of a run, which are those of the folder that it was started in.

Every start notes that folder in `starts.jsonl`, and where the run lies below it, so that a run goes
on from any other. Options stay as they were written: a project that is copied or moved as a whole
goes by its own folder, and one that is read on another machine by the current one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moored.config import Config, EnvConfig
from moored.models.find import embedded_models
from moored.runlog.log import read_records

FOLDER, PLACE = "folder", "place"
"""Keys in `starts.jsonl`, of that folder and of where the run lies below it, if it does."""
FOLDER_OPTIONS = ("source", "folder", "path")
"""Options of environments in which a single word may name a folder; elsewhere it may be anything,
such as the name of a split."""

EnvT = TypeVar("EnvT", bound=EnvConfig)


@dataclass(frozen=True, slots=True)
class StartFolder:
    """What a relative path meant where the run was started."""

    path: Path | None
    """None where it is the current folder, or not known, or gone."""

    def file(self, text: str) -> str:
        """The path from here, if there is such a file or folder there; else the text as it is."""
        if self.path is None or os.path.isabs(os.path.expanduser(text)):
            return text
        there = self.path / text
        return str(there) if _is_path(there) else text

    def model(self, name: str) -> str:
        return name if name in embedded_models() else self.file(name)

    def envs(self, specs: Sequence[EnvT]) -> list[EnvT]:
        """With options that name files and folders; the names of environments stay."""
        return [spec.model_copy(update={"options": self._options(spec.options)}) for spec in specs]

    def _options(self, options: Mapping[str, object]) -> dict[str, object]:
        return {name: self._option(name, value) for name, value in options.items()}

    def _option(self, name: str, value: object) -> object:
        if isinstance(value, Mapping):
            return self._options(value)
        if isinstance(value, list):
            return [self._option(name, item) for item in value]
        if not isinstance(value, str) or not value or self.path is None:
            return value
        may_be_folder = name in FOLDER_OPTIONS or "/" in value
        is_path = may_be_folder or _is_path(self.path / value, file_only=True)
        return self.file(value) if is_path else value


def start_folder(run: str | Path) -> StartFolder:
    """Of a run directory; what is none has started nowhere."""
    noted = noted_folder(run)
    return StartFolder(None if noted is None or is_here(noted) else noted)


def noted_folder(run: str | Path) -> Path | None:
    """The folder that relative paths in a run's options belong to, unless it is gone."""
    folder = Path(run)
    starts = read_records(folder, "starts") if (folder / "starts.jsonl").is_file() else []
    noted = [start for start in starts if FOLDER in start]
    return folder_of(noted[-1], folder) if noted else None


def folder_of(noted: Mapping[str, object], path: Path) -> Path | None:
    """The folder that a start of the run or study at `path` noted, unless it is gone.

    Of a project that was copied or moved with it, the one that is there instead.
    """
    folder, place = Path(str(noted[FOLDER])), noted.get(PLACE)
    if place is not None and not _is_same(folder / str(place), path):
        below = Path(str(place)).parts
        for whole in _whole_paths(path):
            if whole.parts[-len(below) :] == below:
                return Path(*whole.parts[: -len(below)])
    # Unlike `Path.is_dir`, False also where the folder lies in one of another user.
    return folder if os.path.isdir(folder) else None


def about_folder(path: Path, resumed: Path | None = None) -> dict[str, str]:
    """What a start of the run or study at `path` notes: the current folder, or the `resumed` one's.

    And where it lies below it: as it is written, since what is a link here may be one in a copy,
    too, or else as it really is.
    """
    with suppress(FileNotFoundError):  # the current folder was deleted
        folder = resumed or Path.cwd()
        noted = {FOLDER: str(folder)}
        for whole in _whole_paths(path):
            if whole.is_relative_to(folder) and whole != folder:
                return {**noted, PLACE: str(whole.relative_to(folder))}
        return noted
    return {}


def located(config: Config, run: str | Path) -> Config:
    """A run's configuration with the paths that model and environments have from here."""
    start = start_folder(run)
    update = {"model": start.model(config.model), "env": start.envs(config.env)}
    return config.model_copy(update=update)


def is_here(folder: Path) -> bool:
    """True for the current folder, by whatever path."""
    return _is_same(folder, Path(os.curdir))


def _whole_paths(path: Path) -> list[Path]:
    """As it is written, and as it really is; none where the current folder was deleted."""
    with suppress(FileNotFoundError):
        return [Path(os.path.abspath(path)), Path(os.path.realpath(path))]
    return []


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _is_path(path: Path, *, file_only: bool = False) -> bool:
    try:
        return path.is_file() or (not file_only and path.is_dir())
    except (OSError, ValueError):  # a text that is too long for a path, or holds a null byte
        return False
