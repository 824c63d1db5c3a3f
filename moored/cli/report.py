"""`moored report`: a run, a study, or several runs compared, as a page that works offline."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.errors import MooredError

if TYPE_CHECKING:
    from moored.analysis.report import Report

Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="The page; default RUN/report.html, report.html for several runs.",
    ),
]
Png = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Also draw every figure as a PNG file (needs Chromium)."),
]
Until = Annotated[
    int | None,
    typer.Option(metavar="STEP", help="Compare several runs up to this step.", min=1),
]


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or the folder of a study.")],
    out: Out = None,
    png: Png = None,
    until: Until = None,
) -> None:
    """Show a run, a study or several runs on one HTML page.

    It has the verdict, curves, rewards and trajectories, holds everything it needs and opens
    offline. Nothing is measured again, so no model is needed. Runs that cannot be read are named on
    the page; the exit code is then 1. Where none can be read, no page is written.
    """
    from moored.analysis.report import check_folders
    from moored.analysis.report_page import (
        check_can_draw,
        check_can_write,
        find_browser,
        write_pictures,
        write_report,
    )

    runs = _without_files(runs)
    check_folders(runs)
    file = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_can_write(file, "-o")
    check_can_draw()
    if png is not None:
        find_browser()
    report = _build(runs, until)
    if not report.sections:
        # A page that says only this would take the place of an earlier one.
        raise MooredError("; ".join(report.left_out.values()))
    write_report(file, report)
    console = make_console()
    print_line(console, f"{report.title}\nreport: {file}")
    if png is not None:
        pictures = write_pictures(png, report.figures)
        print_line(console, f"figures: {png} ({len(pictures)} PNG files)")
    for path, reason in report.left_out.items():
        print_line(make_console(stderr=True), f"left out: {path}: {reason}")
    if report.left_out:
        raise typer.Exit(1)


def _without_files(paths: Sequence[Path]) -> list[Path]:
    """The paths without the files that lie beside runs, such as logs: `seed-*` names them too."""
    folders = {path.parent for path in paths if path.is_dir()}
    files = [path for path in paths if path.is_file() and path.parent in folders]
    if files:
        said = f"passed over, as no run directory: {files[0]}"
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        print_line(make_console(stderr=True), f"{said}{more}")
    return [path for path in paths if path not in files]


def write_or_explain(runs: Sequence[Path], file: Path, command: str) -> None:
    """Report on runs that are over and stored: a report that cannot be made is only one line."""
    from moored.analysis.report import build_report
    from moored.analysis.report_page import check_can_draw, write_report

    console = make_console()
    try:
        check_can_draw()
        report = build_report(runs, command=command)
        if not report.sections:
            raise MooredError("; ".join(report.left_out.values()))
        write_report(file, report)
    except MooredError as error:
        print_line(console, f"no report: {error}")
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        print_line(console, f"no report ({what}); `{command}` shows where it fails")
    else:
        print_line(console, f"report: {file}")


def _build(runs: Sequence[Path], until: int | None) -> Report:
    """Read the runs, with a progress bar where there are several and someone is watching."""
    from rich.progress import Progress

    from moored.analysis.report import build_report

    command = shlex.join(["moored", *sys.argv[1:]])
    stderr = make_console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("reading runs", total=len(runs), visible=len(runs) > 1)
        return build_report(
            runs, command=command, until=until, on_run=lambda: progress.advance(task)
        )
