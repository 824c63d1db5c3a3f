"""`moored study`: run a grid of arms and seeds, go on with one, and print its table.

Exit codes beyond those of every command: 1 when a run failed, 130 or 143 when Ctrl-C or SIGTERM
stopped the study.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.options import check_config, split_words
from moored.cli.report import write_or_explain
from moored.cli.stopping import StopRequest
from moored.errors import ConfigError, require_packages

if TYPE_CHECKING:
    from rich.console import Console

    from moored.studies.declaration import Study
    from moored.studies.execute import Launch
    from moored.studies.folder import StudyFolder
    from moored.studies.grid import PlannedRun
    from moored.studies.jobs import Jobs


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
    if study.is_analysis:
        has_run_options = any((seeds, plan, jobs != "auto", curves, ray))
        return _analyse(study, what or [], folder, has_run_options=has_run_options)
    folders, overrides = split_words(what or [])
    if folders:
        raise ConfigError(
            f"after the study come options such as num_steps=20, got {folders[0]!r}; presets "
            f"belong in a YAML file of your own, see docs/studies.md"
        )
    if seeds is not None:
        study = replace(study, seeds=parse_seeds(seeds))
    if curves is not None:
        _check_can_store(curves)
    again = _again(name, what, out, only, curves)
    check_owner(folder, study)
    _run(study, overrides, folder, jobs=jobs, ray=ray, is_plan=plan, curves=curves, again=again)


def _analyse(study: Study, words: Sequence[str], folder: Path, *, has_run_options: bool) -> None:
    from moored.cli.study_analysis import analyse

    if has_run_options:
        raise ConfigError(
            f"{study.name} reads the runs of other studies and runs nothing itself; leave out "
            f"--seeds, --jobs, --curves, --ray and --plan"
        )
    analyse(study, [Path(word) for word in words], folder)


def _list_studies() -> None:
    from moored.studies.declaration import describe_studies

    found = describe_studies()
    width = max(map(len, found))
    for name, question in found.items():
        typer.echo(f"{name:<{width}}  {question}")
    typer.echo("\nHow many runs, and for how long: moored study NAME --plan")


def _check_can_store(curves: Path) -> None:
    """Refuse a place for the curve file now, rather than after the last run."""
    if not curves.parent.is_dir():
        raise ConfigError(f"--curves: the folder {str(curves.parent)!r} does not exist; make it")
    if curves.is_dir():
        raise ConfigError(
            f"--curves takes a file such as curves.json, got the folder {str(curves)!r}"
        )


def _again(
    name: str,
    what: Sequence[str] | None,
    out: Path | None,
    only: Sequence[str] | None,
    curves: Path | None,
) -> str:
    """The command that goes on with this study, without seeds and jobs."""
    words = ["moored", "study", name, *(what or [])]
    words += ["--out", str(out)] if out else []
    words += ["--curves", str(curves)] if curves else []
    words += [word for choice in only or [] for word in ("--only", choice)]
    return " ".join(map(quote, words))


def _run(
    study: Study,
    overrides: Sequence[str],
    path: Path,
    *,
    jobs: str,
    ray: str | None,
    is_plan: bool,
    curves: Path | None,
    again: str,
) -> None:
    from moored.cli.study_progress import show_plan
    from moored.studies.folder import StudyFolder, check_runs
    from moored.studies.grid import plan_runs
    from moored.studies.jobs import choose_jobs

    runs = plan_runs(study, overrides, functools.partial(check_config, foreign=not is_plan))
    check_runs(path, runs)
    console = make_console()
    if is_plan:
        show_plan(console, study, runs, path, choose_jobs(jobs, runs))
        return
    require_packages("running a study", ("torch", "transformers"))
    seeds = ",".join(map(str, study.seeds))
    again = f"{again} --seeds {seeds}" + ("" if jobs == "auto" else f" --jobs {jobs}")
    again += f" --ray {ray}" if ray else ""
    with _place(ray, jobs, runs) as (chosen, launch), closing(StudyFolder(path, study)) as folder:
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


@contextmanager
def _place(ray: str | None, jobs: str, runs: Sequence[PlannedRun]) -> Iterator[tuple[Jobs, Launch]]:
    """How many runs at a time, and what starts one: a process here, or an actor of a cluster."""
    from moored.studies.execute import launch_here
    from moored.studies.jobs import choose_jobs

    chosen = choose_jobs(jobs, runs)
    if ray is None:
        yield chosen, launch_here
        return
    from moored.studies.ray_cluster import Cluster

    uses_gpu = any(run.config.engine.device != "cpu" for run in runs)
    with closing(Cluster(ray, uses_gpu=uses_gpu)) as cluster:
        yield cluster.jobs() if jobs == "auto" else chosen, cluster.launch


def _execute(
    console: Console,
    folder: StudyFolder,
    runs: Sequence[PlannedRun],
    todo: Sequence[PlannedRun],
    *,
    jobs: int,
    launch: Launch,
    again: str,
) -> None:
    """Run what is left; leaves the command when it was stopped."""
    from moored.cli.study_progress import StudyProgress
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
        print_line(console, f"go on with: {again}")
        raise typer.Exit(stop.exit_code)


def _store_curves(
    console: Console, study: Study, folder: StudyFolder, runs: Sequence[PlannedRun], file: Path
) -> None:
    """One curve file of all finished runs, by the arms of the factors that have several."""
    from moored.analysis.curve_files import StoredRun, read_run_curves, write_curve_file
    from moored.studies.folder import provenance

    varied = [k for k, factor in enumerate(study.factors) if len(factor.arms) > 1]
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
    from moored.cli.study_progress import show_table
    from moored.runlog.log import write_atomically
    from moored.studies.execute import failure
    from moored.studies.folder import provenance

    failed = [run for run in runs if folder.status(run) == "failed"]
    cells: dict[tuple[str, ...], dict[int, Path]] = {}
    for run in runs:
        by_seed = cells.setdefault(run.arms, {})
        if run not in failed:
            by_seed[run.seed] = folder.run_folder(run)
    names = [factor.name for factor in study.factors]
    table = read_table(cells, factors=names, figures=study.report, against=study.against)
    seconds = {run.name: folder.seconds(run) for run in runs}
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
