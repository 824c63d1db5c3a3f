"""The folder of a study: which runs it holds, and which of them have ended.

`study.json` says what was asked for, `progress.json` how each run ended, `results.json` and
`results.md` hold the table. The runs are ordinary run directories in folders of their arms; the
output of each is in a file beside it. Only one process at a time works on a study.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moored.errors import ConfigError
from moored.runlog.lock import FolderLock
from moored.runlog.log import STOPPED_EARLY, write_atomically
from moored.runlog.machine import describe_machine, installed_versions
from moored.studies.declaration import PlannedRun, Study

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
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(path)
        file = path / "progress.json"
        runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else {}
        self.ended = {name: Ended(**entry) for name, entry in runs.items()}
        """By the name of the run."""

    def close(self) -> None:
        self._lock.close()

    def run_folder(self, run: PlannedRun) -> Path:
        return self.path / run.name

    def log_file(self, run: PlannedRun) -> Path:
        """Where the output of a run goes."""
        return self.path / f"{run.name}.log"

    def status(self, run: PlannedRun) -> Status:
        """A run whose folder was deleted is waiting again."""
        ended = self.ended.get(run.name)
        if (self.run_folder(run) / "config.yaml").is_file():
            return ended.status if ended else "begun"
        return "failed" if ended and ended.status == "failed" else "waiting"

    def note_end(self, run: PlannedRun, exit_code: int, seconds: float) -> None:
        """Remember that a run has finished or failed."""
        before = self.ended.get(run.name)
        self.ended[run.name] = Ended(
            status="finished" if exit_code in (0, STOPPED_EARLY) else "failed",
            exit_code=exit_code,
            seconds=seconds + (before.seconds if before else 0.0),
        )
        runs = {name: asdict(entry) for name, entry in self.ended.items()}
        text = json.dumps({"schema": SCHEMA, "runs": runs}, indent=1)
        write_atomically(self.path / "progress.json", text + "\n")

    def write_study(self, study: Study, overrides: Sequence[str]) -> None:
        """Store what was asked for, and with which versions on what machine."""
        found = {
            "schema": SCHEMA,
            "study": study.name,
            "question": study.question,
            "paper": study.paper,
            "base": study.base,
            "factors": study.factors,
            "overrides": list(overrides),
            "seeds": study.seeds,
            "report": study.report,
            "against": study.against,
            **provenance(),
        }
        write_atomically(self.path / "study.json", json.dumps(found, indent=1) + "\n")


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
    """Refuse a folder that holds a single run or another study, which would be overwritten."""
    advice = "choose another folder with --out"
    if (path / "config.yaml").exists():
        raise ConfigError(f"{str(path)!r} is the directory of a single run; {advice}")
    if (path / "study.json").exists():
        found = json.loads((path / "study.json").read_text(encoding="utf-8"))
        # Files in different folders may have one name, and that of a study of the package.
        if (found["study"], list(found.get("factors", ()))) != (study.name, list(study.factors)):
            raise ConfigError(f"{str(path)!r} holds another study, {found['study']!r}; {advice}")
