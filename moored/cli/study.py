"""`moored study`: run a grid of arms and seeds, go on with one, and print its table.

Exit codes beyond those of every command: 1 when a run failed, 130 or 143 when Ctrl-C or SIGTERM
stopped the study.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.options import check_config, split_words
from moored.cli.report import write_or_explain
from moored.cli.stopping import StopRequest
from moored.errors import ConfigError, require_packages

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moored.analysis.study_table import StudyTable
    from moored.studies.declaration import PlannedRun, Study
    from moored.studies.execute import Launch, What
    from moored.studies.folder import StudyFolder
    from moored.studies.jobs import Jobs

START_UP_S = 8.0
"""A process imports torch and loads its model before the first step."""
REFRESH_S = 1.0
GAP = 3
"""Characters between two columns of a table."""
MARGIN = 8
"""Lines of a terminal that the live table leaves; of more arms it shows those under way."""


def study_command(
    name: Annotated[
        str | None, typer.Argument(help="A study, or a YAML file; none lists the studies.")
    ] = None,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="Options for every run: num_steps=20. For an analysis: folders of studies, or "
            "curve files.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N", help="5: seeds 0 to 4; or 4-8; or 1,3.")
    ] = None,
    jobs: Annotated[str, typer.Option(metavar="N|auto", help="Runs at a time.")] = "auto",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|auto", help="Run on a Ray cluster that shares the folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/STUDY.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTOR=ARM,…", help="Fewer arms; may be given several times."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also store the curves of all runs in one JSON file."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the grid and run nothing.")] = False,
) -> None:
    """Run a study: a grid of runs with several seeds.

    Finished runs are skipped, so the same command goes on with a study that was stopped or killed.
    """
    from moored.studies.declaration import parse_seeds, read_study, restricted
    from moored.studies.folder import check_owner

    if name is None:
        return _list_studies()
    study = restricted(read_study(name), only or [])
    folder = out or Path("runs") / study.name
    if study.of:
        has_run_options = any((seeds, plan, jobs != "auto", curves, ray))
        paths = [Path(word) for word in what or []]
        return _analyse(study, paths, folder, has_run_options=has_run_options)
    folders, overrides = split_words(what or [])
    if folders:
        raise ConfigError(
            f"after the study come options such as num_steps=20, got {folders[0]!r}; presets "
            f"belong in a YAML file of your own, see docs/studies.md"
        )
    if seeds is not None:
        study = study.model_copy(update={"seeds": parse_seeds(seeds)})
    check_owner(folder, study)
    again = _again(name, what, out=out, only=only, curves=curves)
    again += ["--seeds", ",".join(map(str, study.seeds))]
    again += [] if jobs == "auto" else ["--jobs", jobs]
    again += ["--ray", ray] if ray else []
    _run(study, overrides, folder, jobs=jobs, ray=ray, is_plan=plan, curves=curves, again=again)


def _again(
    name: str,
    what: Sequence[str] | None,
    *,
    out: Path | None,
    only: Sequence[str] | None,
    curves: Path | None,
) -> list[str]:
    """The command that goes on with this study."""
    words = ["moored", "study", name, *(what or [])]
    words += ["--out", str(out)] if out else []
    words += ["--curves", str(curves)] if curves else []
    return words + [word for choice in only or [] for word in ("--only", choice)]


def _list_studies() -> None:
    from moored.studies.declaration import read_study, study_names

    names = study_names()
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:<{width}}  {read_study(name).question}")
    typer.echo("\nHow many runs, and for how long: moored study NAME --plan")


def _run(
    study: Study,
    overrides: Sequence[str],
    path: Path,
    *,
    jobs: str,
    ray: str | None,
    is_plan: bool,
    curves: Path | None,
    again: Sequence[str],
) -> None:
    from moored.studies.declaration import plan_runs
    from moored.studies.execute import launch_here
    from moored.studies.folder import StudyFolder, check_runs
    from moored.studies.jobs import choose_jobs

    if curves is not None and (curves.is_dir() or not curves.parent.is_dir()):
        # Now, rather than after the last run.
        raise ConfigError(f"--curves takes a file in a folder that exists, got {str(curves)!r}")
    runs = plan_runs(study, overrides, functools.partial(check_config, foreign=not is_plan))
    check_runs(path, runs)
    console = make_console()
    chosen = choose_jobs(jobs, runs)
    if is_plan:
        _show_plan(console, study, runs, path, chosen)
        return
    require_packages("running a study", ("torch", "transformers"))
    place = nullcontext((chosen, launch_here))
    if ray is not None:
        from moored.studies.ray_cluster import on_cluster

        place = on_cluster(ray, uses_gpu=any(run.config.engine.device != "cpu" for run in runs))
    with place as (of_place, launch), closing(StudyFolder(path, study)) as folder:
        chosen = of_place if jobs == "auto" else chosen
        folder.write_study(study, overrides)
        todo = [run for run in runs if folder.status(run) != "finished"]
        done = len(runs) - len(todo)
        print_line(console, f"{study.name}: {study.question}")
        print_line(
            console,
            f"{len(runs)} runs, {done} of them finished; {chosen.count} at a time "
            f"({chosen.reason}); folder: {path}",
        )
        _execute(console, folder, runs, todo, jobs=chosen.count, launch=launch, again=again)
        if curves is not None:
            _store_curves(console, study, folder, runs, curves)
        _finish(console, study, folder, runs)


def _execute(
    console: Console,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    todo: Sequence[PlannedRun],
    *,
    jobs: int,
    launch: Launch,
    again: Sequence[str],
) -> None:
    """Run what is left; leaves the command when it was stopped."""
    from moored.studies.execute import run_all

    with StopRequest() as stop, StudyProgress(console, folder, runs) as progress:
        stop.wait_for_step()
        try:
            run_all(
                folder,
                todo,
                jobs=jobs,
                launch=launch,
                on_event=progress.on_event,
                on_poll=progress.on_poll,
                is_stopped=lambda: stop.is_made,
            )
        except KeyboardInterrupt:
            print_line(console, "stopped at once; the steps in flight are lost")
    if stop.is_made and any(folder.status(run) in ("waiting", "begun") for run in runs):
        print_line(console, f"go on with: {join(again)}")
        raise typer.Exit(stop.exit_code)


def _store_curves(
    console: Console, study: Study, folder: StudyFolder, runs: Sequence[PlannedRun], file: Path
) -> None:
    """One curve file of all finished runs, by the arms of the factors that have several."""
    from moored.analysis.curves import StoredRun, read_run_curves, write_curve_file
    from moored.studies.folder import provenance

    varied = [k for k, arms in enumerate(study.factors.values()) if len(arms) > 1]
    found: dict[str, list[StoredRun]] = {}
    for run in runs:
        if folder.status(run) == "finished":
            name = "/".join(run.arms[k] for k in varied) or run.label
            stored = read_run_curves(folder.run_folder(run), run.seed)
            found.setdefault(name, []).append(stored)
    if not found:
        print_line(console, f"no run has finished, so {file} is not written")
        return
    write_curve_file(file, found, {"study": study.name, **provenance()})
    print_line(console, f"curves: {file}")


def _finish(
    console: Console, study: Study, folder: StudyFolder, runs: Sequence[PlannedRun]
) -> None:
    """Print and store the table; list what failed."""
    from moored.analysis.study_table import read_table, to_dict, to_markdown
    from moored.runlog.log import write_atomically
    from moored.studies.execute import failure
    from moored.studies.folder import provenance

    failed = [run for run in runs if folder.status(run) == "failed"]
    cells: dict[tuple[str, ...], dict[int, Path]] = {}
    for run in runs:
        by_seed = cells.setdefault(run.arms, {})
        if run not in failed:
            by_seed[run.seed] = folder.run_folder(run)
    table = read_table(
        cells, factors=list(study.factors), figures=study.report, against=study.against
    )
    seconds = {
        run.name: ended.seconds if (ended := folder.ended.get(run.name)) else None for run in runs
    }
    found = {"study": study.name, "paper": study.paper, **provenance(), "run_seconds": seconds}
    reasons = {run.name: failure(folder, run) for run in failed}
    text = json.dumps({**found, **to_dict(table), "failed": reasons}, indent=1)
    write_atomically(folder.path / "results.json", text + "\n")
    page = f"# {study.name}\n\n{study.question}\n\n{to_markdown(table)}"
    page += "".join(
        f"\nNot in the table, it failed: {name}: {why}\n" for name, why in reasons.items()
    )
    page += f"\nThe paper: {study.paper}\n" if study.paper else ""
    write_atomically(folder.path / "results.md", page)
    show_table(console, study, table)
    print_line(console, f"table: {folder.path / 'results.md'}, {folder.path / 'results.json'}")
    if any(row.runs for row in table.rows):
        again = join(["moored", "report", str(folder.path)])
        write_or_explain([folder.path], folder.path / "report.html", again)
    if failed:
        stderr = make_console(stderr=True)
        print_line(stderr, f"{len(failed)} of {len(runs)} runs failed:")
        for name, why in reasons.items():
            print_line(stderr, f"  {name}: {why}")
        raise typer.Exit(1)


def _analyse(study: Study, given: Sequence[Path], out: Path, *, has_run_options: bool) -> None:
    """Correlate every diagnostic with success over runs of studies; print and store."""
    from moored.analysis.correlate import correlate, explanation, runs_lines, time_lines
    from moored.analysis.curves import read_all
    from moored.analysis.study_table import markdown_table
    from moored.runlog.log import write_atomically
    from moored.studies.folder import check_owner, provenance

    if has_run_options:
        raise ConfigError(
            f"{study.name} reads the runs of other studies and runs nothing itself; leave out "
            f"--seeds, --jobs, --curves, --ray and --plan"
        )
    check_owner(out, study)
    folders = [Path("runs") / name for name in study.of]
    sources = given or [folder for folder in folders if folder.is_dir()]
    if not sources:
        raise ConfigError(
            f"none of {', '.join(map(str, folders))} exists; run one of these studies first, or "
            f"name folders of studies or curve files"
        )
    curves, left_out = read_all(sources)
    found = correlate(curves)
    tables = [runs_lines(found), time_lines(found)]
    console = make_console()
    print_line(console, f"{study.name}: {study.question}")
    for lines in tables:
        _print_table(console, lines, 1)
    print_line(console, explanation(found))
    for path, reason in left_out.items():
        print_line(console, f"left out: {path}: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    head = {"schema": 1, "study": study.name, "paper": study.paper, **provenance()}
    head |= {"runs": [run.name for run in curves]}
    write_atomically(out / "study.json", json.dumps(head, indent=1) + "\n")
    values = {**head, "correlations": [asdict(each) for each in found], "left_out": left_out}
    write_atomically(out / "results.json", json.dumps(values, indent=1) + "\n")
    shown = "\n".join([*map(markdown_table, tables), f"{explanation(found)}\n"])
    page = f"# {study.name}\n\n{study.question}\n\n{shown}"
    page += f"\nThe paper: {study.paper}\n" if study.paper else ""
    write_atomically(out / "results.md", page)
    print_line(console, f"table: {out / 'results.md'}, {out / 'results.json'}")


def _show_plan(
    console: Console, study: Study, runs: Sequence[PlannedRun], folder: Path, jobs: Jobs
) -> None:
    """The grid, how many runs it has, and about how long they take."""
    print_line(console, f"{study.name}: {study.question}")
    if study.paper:
        print_line(console, f"the paper: {study.paper}")
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for factor in study.factors:
        table.add_column(factor)
    for heading in ("steps", "moored train"):
        table.add_column(heading, overflow="fold")
    for run in runs:
        if run.seed == study.seeds[0]:
            words = [word for word in run.words if not word.startswith("seed=")]
            table.add_row(*run.arms, str(run.config.num_steps), " ".join(words))
    console.print(table)
    num_arms = len(runs) // len(study.seeds)
    seeds = ", ".join(map(str, study.seeds))
    print_line(console, f"{len(runs)} runs: {num_arms} arms x {len(study.seeds)} seeds ({seeds})")
    print_line(console, f"folder: {folder}; {jobs.count} at a time ({jobs.reason})")
    if study.seconds_per_step is not None:
        steps = sum(run.config.num_steps for run in runs)
        seconds = steps * study.seconds_per_step + START_UP_S * len(runs)
        print_line(
            console,
            f"about {_duration(seconds / min(jobs.count, len(runs)))}, at "
            f"{study.seconds_per_step:g} s a step, measured with the study's own options on one "
            f"CPU core",
        )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StudyProgress:
    """A live table on a terminal, one row per arm; in a pipe one line per change."""

    def __init__(self, console: Console, folder: StudyFolder, runs: Sequence[PlannedRun]) -> None:
        from rich.live import Live

        self._console = console
        self._folder = folder
        self._runs = runs
        self._shown_s = 0.0
        # Refreshed by hand: a thread of rich's would be alive while children are forked.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def on_event(self, run: PlannedRun, what: What, detail: str) -> None:
        """One line per change; on a terminal only for what needs attention."""
        if self._console.is_terminal and what not in ("failed", "waits"):
            return
        done = sum(self._folder.status(run) == "finished" for run in self._runs)
        line = f"[{done}/{len(self._runs)}] {run.name} {what} {detail}"
        print_line(self._console, line.rstrip())

    def on_poll(self, under_way: Sequence[PlannedRun]) -> None:
        """Draw the table again, at most once a second."""
        if not self._console.is_terminal or time.monotonic() - self._shown_s < REFRESH_S:
            return
        self._live.update(self._table(under_way), refresh=True)
        self._shown_s = time.monotonic()

    def _table(self, under_way: Sequence[PlannedRun]) -> Table:
        from rich import box
        from rich.table import Table

        done = sum(self._folder.status(run) == "finished" for run in self._runs)
        title = f"{done} of {len(self._runs)} runs finished"
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", title=title)
        for heading in ("arm", "finished", "under way"):
            table.add_column(heading)
        labels = list(dict.fromkeys(run.label for run in self._runs))
        if len(labels) > self._console.height - MARGIN:
            labels = [label for label in labels if label in {run.label for run in under_way}]
        for label in labels:
            runs = [run for run in self._runs if run.label == label]
            status = [self._folder.status(run) for run in runs]
            failed = f", {status.count('failed')} failed" if "failed" in status else ""
            now = [self._step(run) for run in under_way if run.label == label]
            table.add_row(
                label, f"{status.count('finished')} of {len(runs)}{failed}", "; ".join(now)
            )
        return table

    def _step(self, run: PlannedRun) -> str:
        """`seed 3: step 40 of 100, success 0.12`."""
        from moored.runlog.log import read_records

        path = self._folder.run_folder(run)
        steps = read_records(path) if (path / "metrics.jsonl").exists() else []
        if not steps:
            return f"seed {run.seed}: starting"
        success = steps[-1].get("rollout/success_rate")
        shown = f", success {success:.2f}" if isinstance(success, float) else ""
        return f"seed {run.seed}: step {steps[-1]['step']} of {run.config.num_steps}{shown}"


def show_table(console: Console, study: Study, table: StudyTable) -> None:
    """Means with 95 % intervals over seeds, and differences where the study asks for them."""
    from moored.analysis.study_table import table_lines, table_notes

    _print_table(console, table_lines(table), len(study.factors))
    if table.against is not None and any(row.differences for row in table.rows):
        print_line(
            console, f"Differences from {' '.join(table.against)}, seed by seed:", style="bold"
        )
        _print_table(console, table_lines(table, differences=True), len(study.factors))
    for note in table_notes(table):
        print_line(console, note, style="dim")
    for path, reason in table.left_out.items():
        print_line(console, f"left out: {path}: {reason}", style="dim")


def _print_table(console: Console, lines: Sequence[Sequence[str]], num_names: int) -> None:
    """As one table, or below each other in several that are narrow enough for the terminal."""
    from rich import box
    from rich.table import Table

    for columns in _blocks(lines, num_names, console.width):
        shown = Table(box=box.SIMPLE_HEAD, header_style="bold")
        for column in columns:
            justify = "left" if column < num_names else "right"
            # Headings are broken at spaces, cells are not; a column alone takes what there is.
            width = _width(lines, column) if len(columns) > num_names + 1 else None
            shown.add_column(lines[0][column], justify=justify, width=width)
        for line in lines[1:]:
            shown.add_row(*(line[column] for column in columns))
        console.print(shown)


def _blocks(lines: Sequence[Sequence[str]], num_names: int, width: int) -> list[list[int]]:
    """Columns of each table: the names, and as many figures as fit with whole numbers."""
    widths = [_width(lines, column) + GAP for column in range(len(lines[0]))]
    names = list(range(num_names))
    room = width - sum(widths[:num_names]) - 1
    blocks: list[list[int]] = [[]]
    for column in range(num_names, len(widths)):
        if blocks[-1] and sum(widths[k] for k in (*blocks[-1], column)) > room:
            blocks.append([])
        blocks[-1].append(column)
    return [[*names, *block] for block in blocks]


def _width(lines: Sequence[Sequence[str]], column: int) -> int:
    """Of the widest cell, or word of the heading."""
    header, *rows = lines
    return max(map(len, [*header[column].split(), *(row[column] for row in rows)]))
