"""`moored compare`: the ends of several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from moored.analysis.compare import Comparison, TaskReplies

NAME_WIDTH, ARM_WIDTH = 22, 11
"""Columns of a terminal for names of figures, and for an arm with a number in each line."""
SEEN_WIDTH, REPLY_WIDTH = 28, 30
"""The same for a step with what the model saw, and for a reply beside it."""

Last = Annotated[
    int, typer.Option(metavar="K", help="Steps averaged at the start and at the end.", min=1)
]
Until = Annotated[
    int | None, typer.Option(metavar="STEP", help="Ignore all steps after this one.", min=1)
]
Replies = Annotated[
    bool,
    typer.Option("--replies", help="Also show replies to the same tasks: start, middle, end."),
]


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    last: Last = 10,
    until: Until = None,
    replies: Replies = False,
    as_json: AsJson = False,
) -> None:
    """Compare start and end of runs; seeds are put together."""
    from moored.analysis.compare import compare_runs, shared_replies

    found = compare_runs(runs, last=last, until=until)
    shown = [path for path in runs if str(path) not in found.left_out]
    written = shared_replies(shown) if replies else []
    if as_json:
        print_json(_as_dict(found) | {"replies": list(map(asdict, written))})
    else:
        _show(make_console(), found)
        if written:
            _show_replies(make_console(), shown, written)
    for path, reason in found.left_out.items():
        print_line(make_console(stderr=True), f"left out: {path}: {reason}")
    if found.left_out:
        raise typer.Exit(1)


def _as_dict(found: Comparison) -> dict[str, object]:
    arms = [
        {
            "label": arm.label,
            "runs": [str(run.path) for run in arm.runs],
            "seeds": arm.seeds,
            "last_steps": [run.last_step for run in arm.runs],
            "steps_averaged": [run.num_averaged for run in arm.runs],
            "interval_over": arm.interval_over,
            "figures": {name: asdict(figure) for name, figure in arm.figures().items()},
            "verdicts": [run.verdict for run in arm.runs],
            "alarm_steps": [run.alarm_step for run in arm.runs],
            "lost_episodes": [run.num_lost for run in arm.runs],
        }
        for arm in found.arms
    ]
    return {"arms": arms, "options": dict(found.options), "left_out": dict(found.left_out)}


def _show(console: Console, found: Comparison) -> None:
    from moored.analysis.compare import explanation

    for arm in found.arms:
        for run in arm.runs:
            print_line(console, f"{arm.label}  {run.path}  ({run.last_step} steps)")
    num_arms = len(found.arms)
    size = max(1, (console.width - NAME_WIDTH) // ARM_WIDTH)
    # More columns than fit would have nothing in them but ellipses.
    blocks = [range(i, min(i + size, num_arms)) for i in range(0, num_arms, size)]
    for block in blocks:
        console.print(_figure_table(found, block))
    for line in explanation(found):
        console.print(line, style="dim")
    if found.options:
        console.print("\nOptions that differ", style="bold")
        for block in blocks:
            console.print(_option_table(found, block))
    elif len(found.arms) > 1:
        console.print("\nThe runs have the same options.")


def _figure_table(found: Comparison, block: range) -> Table:
    """One column for each arm of the block."""
    from rich import box
    from rich.table import Table

    from moored.analysis.compare import alarms_of, figure_cell, verdicts_of

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    arms = [found.arms[place] for place in block]
    table.add_column("start → end")
    for arm in arms:
        table.add_column(arm.label, justify="right")
    figures = [arm.figures() for arm in arms]
    for name in dict.fromkeys(name for each in figures for name in each):
        table.add_row(name, *(figure_cell(each.get(name)) for each in figures))
    table.add_row("verdict", *map(verdicts_of, arms))
    table.add_row("alarm at step", *map(alarms_of, arms))
    return table


def _option_table(found: Comparison, block: range) -> Table:
    from rich import box
    from rich.table import Table

    from moored.analysis.compare import option_cell

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("option", overflow="fold")
    for place in block:
        table.add_column(found.arms[place].label, overflow="fold")
    for name, values in found.options.items():
        table.add_row(name, *(option_cell(values[place]) for place in block))
    return table


def _show_replies(console: Console, runs: Sequence[Path], written: Sequence[TaskReplies]) -> None:
    """Side by side where there is room, else one below the other."""
    names = [run.name for run in runs]
    labels = names if len(set(names)) == len(names) else list(map(str, runs))
    if console.width >= SEEN_WIDTH + REPLY_WIDTH * len(labels):
        console.print(_reply_table(labels, written))
        return
    for each in written:
        console.print(f"\nstep {each.step}", style="bold")
        console.print(each.seen)
        for label, reply in zip(labels, each.replies, strict=True):
            console.print(f"{label}:", style="bold")
            console.print(reply)


def _reply_table(labels: Sequence[str], written: Sequence[TaskReplies]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_lines=True)
    table.add_column("step", justify="right")
    table.add_column("what the model saw", overflow="fold")
    for label in labels:
        table.add_column(label, overflow="fold", ratio=1)
    for each in written:
        table.add_row(str(each.step), each.seen, *each.replies)
    return table
