"""A report on one run or on several: its headline, and sections of figures, tables and texts.

`build_report` reads run directories only, no model; `report_of_diagnosis` shows what `moored
diagnose` found. `report_page` makes either a page, and its figures PNG files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from moored.analysis.figures import Chart
from moored.analysis.findings import Finding, Grid, Kind
from moored.errors import ConfigError, MooredError
from moored.runlog.machine import PACKAGES, installed_versions, system_name

STUDY_FILE = "study.json"
"""What tells the folder of a study from that of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure with its name."""

    slug: str
    """Unique in the report; the name of its PNG."""
    title: str
    chart: Chart
    caption: str = ""


class Passage(NamedTuple):
    """A prompt or an observation, and what the model wrote."""

    heading: str
    seen: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """Texts of a model that belong together, such as the turns of a trajectory."""

    title: str
    about: str
    passages: tuple[Passage, ...]
    more: str = ""
    """What is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report under its own heading; whatever is empty is not shown."""

    title: str
    text: str = ""
    figures: tuple[Drawn, ...] = ()
    columns: int = 2
    """Figures side by side, where there is room."""
    grids: Mapping[str, Grid] = field(default_factory=dict)
    """Caption -> table."""
    is_folded: bool = False
    """The tables and the block are shown on demand."""
    articles: tuple[Article, ...] = ()
    block: str = ""
    """Text as it is, such as a configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything the page shows, in order."""

    kind: Kind
    title: str
    sections: tuple[Section, ...] = ()
    meaning: tuple[str, ...] = ()
    """Why, in sentences."""
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Finding, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Run directory -> why it cannot be shown."""
    command: str = ""
    versions: str = ""

    @property
    def figures(self) -> dict[str, Drawn]:
        found = {drawn.slug: drawn for section in self.sections for drawn in section.figures}
        assert len(found) == sum(len(section.figures) for section in self.sections)
        return found

    @property
    def shows_dependence(self) -> bool:
        """False for warm starts, in which it is not measured."""
        return any(slug.startswith("plane") for slug in self.figures)

    def made_by(self, command: str) -> Report:
        """Without empty sections, and with what the page ends with."""
        shown = tuple(s for s in self.sections if s.figures or s.grids or s.articles or s.block)
        return replace(self, sections=shown, command=command, versions=versions_text())


def check_folders(paths: Sequence[Path]) -> None:
    """Raise before anything is read when a path is not a folder."""
    missing = [path for path in paths if not path.is_dir()]
    if missing:
        raise ConfigError(f"there is no folder {str(missing[0])!r}; give run directories")


def build_report(
    runs: Sequence[Path],
    *,
    command: str,
    until: int | None = None,
    on_run: Callable[[], None] | None = None,
) -> Report:
    """Read the runs; those that cannot be shown are named in the report.

    One run or the folder of a study is shown in full, several runs are compared. `until` ignores
    later steps when comparing; `on_run` is called after each run that was read.
    """
    from moored.analysis.report_run import report_of_run
    from moored.analysis.report_runs import report_of_runs
    from moored.analysis.report_study import report_of_study

    paths = list(dict.fromkeys(runs))
    check_folders(paths)
    if len(paths) > 1:
        return report_of_runs(paths, until=until, on_run=on_run).made_by(command)
    if until is not None:
        raise ConfigError("--until is for comparing several runs; one is shown in full")
    try:
        is_study = (paths[0] / STUDY_FILE).is_file()
        found = report_of_study(paths[0], on_run) if is_study else report_of_run(paths[0])
    except (MooredError, OSError) as error:
        found = empty_report({str(paths[0]): str(error)})
    return found.made_by(command)


def empty_report(left_out: Mapping[str, str]) -> Report:
    """When no run can be shown."""
    what = "The run" if len(left_out) == 1 else f"None of the {len(left_out)} runs"
    can = "cannot" if len(left_out) == 1 else "can"
    return Report(kind=Kind.WARNING, title=f"{what} {can} be shown", left_out=left_out)


def versions_text() -> str:
    """Of moored, Python and the packages that numbers and figures depend on; and the system."""
    found = installed_versions((*PACKAGES, "pyarrow", "plotly"))
    return ", ".join([*(f"{name} {number}" for name, number in found.items()), system_name()])
