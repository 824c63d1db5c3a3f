"""Relative paths in the options of a run, which are those of the folder that it was started in.

Every start notes that folder in `starts.jsonl`, so that a run goes on from any other. Options stay
as they were written: a project that is moved as a whole, or read on another machine, goes by the
current folder as before.
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

FOLDER = "folder"
"""Key in `starts.jsonl`."""
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
    noted = [str(start[FOLDER]) for start in starts if FOLDER in start]
    # Unlike `Path.is_dir`, False also where the folder lies in one of another user.
    return Path(noted[-1]) if noted and os.path.isdir(noted[-1]) else None


def about_folder(resumed: Path | None = None) -> dict[str, str]:
    """What a start notes: the folder of the run that it resumes, or else the current one."""
    with suppress(FileNotFoundError):  # the current folder was deleted
        return {FOLDER: str(resumed or Path.cwd())}
    return {}


def located(config: Config, run: str | Path) -> Config:
    """A run's configuration with the paths that model and environments have from here."""
    start = start_folder(run)
    update = {"model": start.model(config.model), "env": start.envs(config.env)}
    return config.model_copy(update=update)


def is_here(folder: Path) -> bool:
    """True for the current folder, by whatever path."""
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _is_path(path: Path, *, file_only: bool = False) -> bool:
    try:
        return path.is_file() or (not file_only and path.is_dir())
    except (OSError, ValueError):  # a text that is too long for a path, or holds a null byte
        return False
