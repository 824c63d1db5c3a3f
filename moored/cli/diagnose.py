"""`moored diagnose`: did a run collapse? From what training measured, or from rollout files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import (
    ROWS,
    SERVER,
    AsJson,
    ColumnNames,
    Concurrency,
    Endpoint,
    GroupColumn,
    KeyVariable,
    Reader,
    RewardColumns,
    Rollouts,
    SkipBad,
    Timeout,
)
from moored.reply import THINK_TAGS

if TYPE_CHECKING:
    from moored.analysis.diagnosis import Diagnosis

EXIT_CODES = {"healthy": 0, "collapsed": 3, "cannot_tell": 4}
"""Of `--check`, by verdict."""

SCORING, DEVICE = "How much is scored, and how", "A model in this process"
"""Panels of help."""

Model = Annotated[
    str | None,
    typer.Option(
        help="What scores: see `moored models`, 'out/checkpoint-{step}' for the nearest checkpoint "
        "of each step, or its name at --endpoint; default: the run's own.",
    ),
]
Rescore = Annotated[
    bool,
    typer.Option(
        "--rescore",
        help="Score a run's rollouts afresh with its nearest checkpoints, instead of taking what "
        "training measured.",
    ),
]
Page = Annotated[Path | None, typer.Option(metavar="PAGE", help="Also write an HTML page.")]
Check = Annotated[
    bool,
    typer.Option("--check", help="Exit with 3 when collapsed, 4 when it cannot be told, else 0."),
]
ReasoningTags = Annotated[
    tuple[str, str],
    typer.Option(metavar="OPEN CLOSE", help="What stands around reasoning.", rich_help_panel=ROWS),
]
Whole = Annotated[
    bool,
    typer.Option(
        "--whole", help="Take replies without tags as reasoning throughout.", rich_help_panel=ROWS
    ),
]
TurnNumber = Annotated[
    int,
    typer.Option(
        help="Turn of each episode (own runs, message lists).", min=1, rich_help_panel=ROWS
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Stored steps pooled into one look; default: as few as it takes for 8 prompts.",
        min=1,
        rich_help_panel=SCORING,
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        "--prompts",
        help="N; default: as many as a look has, 16 at most.",
        min=2,
        rich_help_panel=SCORING,
    ),
]
NumPairs = Annotated[
    int,
    typer.Option("--pairs", help="M, reasonings in each look.", min=2, rich_help_panel=SCORING),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens scored per reasoning.", min=1, rich_help_panel=SCORING),
]
ByTurn = Annotated[
    bool | None,
    typer.Option(
        "--by-turn/--no-by-turn",
        help="Measure each turn of the last look too (own runs); default: with --html.",
        show_default=False,
        rich_help_panel=SCORING,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Score at the temperature that rollouts were sampled at; default: the run's, else 1.",
        min=0.01,
        rich_help_panel=SCORING,
    ),
]
NumDraws = Annotated[
    int, typer.Option(help="For intervals and p-values.", min=0, rich_help_panel=SCORING)
]
Seed = Annotated[int, typer.Option(help="Of what is drawn.", min=0, rich_help_panel=SCORING)]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda.", rich_help_panel=DEVICE)]
DtypeName = Annotated[str, typer.Option(help="auto, float32, bfloat16.", rich_help_panel=DEVICE)]
TokenizerName = Annotated[
    str | None,
    typer.Option(help="For text at --endpoint: a folder or hub id.", rich_help_panel=SERVER),
]


def diagnose_command(
    paths: Rollouts,
    model: Model = None,
    rescore: Rescore = False,
    html: Page = None,
    check: Check = False,
    as_json: AsJson = False,
    columns: ColumnNames = None,
    reward: RewardColumns = None,
    group: GroupColumn = None,
    tags: ReasoningTags = THINK_TAGS,
    whole: Whole = False,
    turn: TurnNumber = 1,
    reader: Reader = None,
    skip_bad: SkipBad = False,
    window: Window = None,
    num_prompts: NumPrompts = None,
    num_pairs: NumPairs = 64,
    max_tokens: MaxTokens = None,
    by_turn: ByTurn = None,
    temperature: Temperature = None,
    draws: NumDraws = 1000,
    seed: Seed = 0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    endpoint: Endpoint = None,
    tokenizer: TokenizerName = None,
    api_key_env: KeyVariable = None,
    concurrency: Concurrency = 32,
    timeout: Timeout = 300.0,
) -> None:
    """Tell whether reasoning still depends on its prompt."""
    from moored.analysis.models import Device
    from moored.analysis.reading import DrawOptions
    from moored.analysis.scoring import Size
    from moored.cli.diagnosing import Request, Server, read_options

    request = Request(
        paths=paths,
        model=model,
        temperature=temperature,
        where=Device(device, dtype),
        server=Server.at(endpoint, tokenizer, api_key_env, concurrency, timeout),
        reading=read_options(reader, tags, whole, turn, reward, columns, group),
        drawing=DrawOptions(
            num_prompts=num_prompts,
            num_pairs=num_pairs,
            window=window,
            skip_bad=skip_bad,
            seed=seed,
        ),
        size=Size(num_prompts=num_prompts, num_pairs=num_pairs, max_tokens=max_tokens),
        draws=draws,
        by_turn=by_turn,
        page=html,
    )
    found = request.answer(rescore=rescore)
    _present(found, list(map(str, paths)), html=html, as_json=as_json)
    if check:
        raise typer.Exit(EXIT_CODES[found.verdict])


def _present(found: Diagnosis, files: list[str], *, html: Path | None, as_json: bool) -> None:
    """Print a diagnosis, and write its page."""
    if as_json:
        print_json({"files": files} | found.to_dict())
    else:
        _show(found)
    if html is not None:
        from moored.analysis.report_diagnosis import report_of_diagnosis
        from moored.analysis.report_page import write_report

        command = shlex.join(["moored", *sys.argv[1:]])
        write_report(html, report_of_diagnosis(found, files, command=command))
        typer.echo(f"page: {html}", err=True)


def _show(found: Diagnosis) -> None:
    from moored.analysis.findings import (
        curve_table,
        explanation,
        headline,
        lines,
        notes,
        step_table,
        turn_table,
    )

    console = make_console()
    (title,) = lines([headline(found)])
    title.stylize("bold")
    print_line(console, title)
    for line in lines(explanation(found)):
        print_line(console, line)
    for series in found.series:
        if len(found.series) > 1:
            console.print(f"\n{series.name}", style="bold")
        several = len(series.looks) > 1
        table = (
            curve_table(series, console.width)
            if several
            else step_table(series.looks[0], console.width)
        )
        console.print(table)
        if series.turns:
            console.print(turn_table(series, console.width))
    for line in lines(notes(found)):
        print_line(console, line)
