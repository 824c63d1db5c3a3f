"""The folder of a study: whose it is, which runs it holds, and which of them have ended.

`study.json` says what was asked for, `progress.json` how each run ended, `results.json` and
`results.md` hold the table. The runs are ordinary run directories in folders of their arms; the
output of each is in a file beside it. Only one process at a time works on a study.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moored.errors import ConfigError, RunLogError
from moored.runlog.lock import FolderLock
from moored.runlog.log import STOPPED_EARLY, write_atomically
from moored.runlog.machine import describe_machine, installed_versions
from moored.studies.declaration import Study
from moored.studies.grid import PlannedRun

if TYPE_CHECKING:
    from moored.runlog.changes import Change

SCHEMA = 1
Status = Literal["waiting", "begun", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended when it was last started."""

    status: Literal["finished", "failed"]
    exit_code: int
    seconds: float
    """Of all its starts together, except those that were killed along with the study."""


class StudyFolder:
    """One study on disk; holds its lock until it is closed."""

    def __init__(self, path: Path, study: Study) -> None:
        check_owner(path, study)
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path)
        except OSError as error:
            raise RunLogError(
                f"cannot write to {str(path)!r}: {error.strerror}; choose another folder with --out"
            ) from error
        self._ended = _read_progress(path / "progress.json")

    def close(self) -> None:
        self._lock.close()

    def run_folder(self, run: PlannedRun) -> Path:
        return self.path / run.name

    def log_file(self, run: PlannedRun) -> Path:
        """Where the output of a run goes."""
        folder = self.run_folder(run)
        return folder.with_name(f"{folder.name}.log")

    def status(self, run: PlannedRun) -> Status:
        """A run whose folder was deleted is waiting again."""
        if not (self.run_folder(run) / "config.yaml").is_file():
            return "failed" if self._was(run, "failed") else "waiting"
        if self._was(run, "finished"):
            return "finished"
        return "failed" if self._was(run, "failed") else "begun"

    def seconds(self, run: PlannedRun) -> float | None:
        """How long a run took in all; None before it has ended."""
        ended = self._ended.get(run.name)
        return None if ended is None else ended.seconds

    def exit_code(self, run: PlannedRun) -> int | None:
        """Of the last start that ended; None before that."""
        ended = self._ended.get(run.name)
        return None if ended is None else ended.exit_code

    def note_end(self, run: PlannedRun, exit_code: int, seconds: float) -> None:
        """Remember that a run has finished or failed."""
        before = self._ended.get(run.name)
        ended = Ended(
            status="finished" if exit_code in (0, STOPPED_EARLY) else "failed",
            exit_code=exit_code,
            seconds=seconds,
        )
        if before is not None:
            ended = replace(ended, seconds=before.seconds + seconds)
        self._ended[run.name] = ended
        runs = {name: asdict(entry) for name, entry in self._ended.items()}
        text = json.dumps({"schema": SCHEMA, "runs": runs}, indent=1)
        write_atomically(self.path / "progress.json", text + "\n")

    def write_study(self, study: Study, overrides: Sequence[str]) -> None:
        """Store what was asked for, and with which versions on what machine."""
        found = {
            "schema": SCHEMA,
            "study": study.name,
            "is_shipped": study.is_shipped,
            "question": study.question,
            "paper": study.paper,
            "base": [word.text for word in study.base],
            "factors": {
                factor.name: {arm.name: [word.text for word in arm.words] for arm in factor.arms}
                for factor in study.factors
            },
            "overrides": list(overrides),
            "seeds": list(study.seeds),
            "report": list(study.report),
            "against": study.against,
            **provenance(),
        }
        write_atomically(self.path / "study.json", json.dumps(found, indent=1) + "\n")

    def _was(self, run: PlannedRun, status: str) -> bool:
        return run.name in self._ended and self._ended[run.name].status == status


def provenance() -> dict[str, object]:
    """Command, versions and machine, for a result that can be repeated."""
    return {
        "command": ["moored", *sys.argv[1:]],
        "versions": installed_versions(),
        "hardware": describe_machine(),
    }


def check_runs(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """Refuse to go on with run directories that have other options than the study plans."""
    from moored.runlog.changes import is_moved

    for run in runs:
        for name, change in changes_of(folder / run.name, run).items():
            if not is_moved(change.old, change.new):
                raise ConfigError(
                    f"{str(folder / run.name)!r} is a run with {name} = {change.old!r}, but the "
                    f"study now says {change.new!r}; give the options it was started with, or "
                    f"another folder with --out"
                )


def changes_of(folder: Path, run: PlannedRun) -> Mapping[str, Change]:
    """What the study plans that its run directory has otherwise; nothing where there is none."""
    from moored.config import load_config
    from moored.runlog.changes import changed_options

    file = folder / "config.yaml"
    return changed_options(load_config(file), run.config) if file.is_file() else {}


def check_owner(path: Path, study: Study) -> None:
    """Refuse a folder that holds a run, another study, or something else."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    advice = "choose another folder with --out"
    if not path.is_dir():
        raise ConfigError(f"{str(path)!r} is a file; {advice}")
    if (path / "config.yaml").exists():
        raise ConfigError(f"{str(path)!r} is the directory of a single run; {advice}")
    try:
        found = json.loads((path / "study.json").read_text(encoding="utf-8"))
        owner, factors = found["study"], list(found.get("factors", ()))
    except FileNotFoundError:
        # A kill before study.json was written leaves the lock, and maybe a part of that file.
        if all(file.name == "lock" or file.name.startswith(".study") for file in path.iterdir()):
            return
        raise ConfigError(f"{str(path)!r} holds something other than a study; {advice}") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"cannot read {str(path / 'study.json')!r}: {error}; {advice}") from error
    if owner != study.name:
        raise ConfigError(f"{str(path)!r} holds the study {owner!r}, not {study.name!r}; {advice}")
    # Files in different folders may have one name, and that of a study of the package.
    own = [factor.name for factor in study.factors]
    if found.get("is_shipped", study.is_shipped) != study.is_shipped or factors != own:
        raise ConfigError(
            f"{str(path)!r} holds another study called {owner!r}, with the factors "
            f"{', '.join(factors) or '(none)'}; {advice}"
        )


def _read_progress(file: Path) -> dict[str, Ended]:
    if not file.exists():
        return {}
    try:
        data: Mapping[str, Mapping] = json.loads(file.read_text(encoding="utf-8"))["runs"]
        return {name: Ended(**entry) for name, entry in data.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise RunLogError(
            f"cannot read {str(file)!r}: {error}; delete it, and finished runs are looked at again"
        ) from error
