"""`moored diagnose`: did a run collapse? From what training measured, or from rollout files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import counted, make_console, print_line
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
from moored.errors import ConfigError, MooredError
from moored.reply import THINK_TAGS

if TYPE_CHECKING:
    from moored.analysis.diagnose import LookOptions, Meter
    from moored.analysis.diagnosis import Diagnosis
    from moored.analysis.models import Device
    from moored.analysis.scorers import Scorer, Scorers
    from moored.files.records import ReadOptions

EXIT_CODES = {"healthy": 0, "collapsed": 3, "cannot_tell": 4}
"""Of `--check`, by verdict."""

SHOW_AFTER_S = 2.0
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
    int | None,
    typer.Option(
        help="Measure one turn of each episode alone (own runs, message lists); default: all.",
        min=1,
        show_default=False,
        rich_help_panel=ROWS,
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
        help="Measure each turn of the last look too; default: with --html.",
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
    turn: TurnNumber = None,
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
    from moored.analysis.diagnose import LookOptions
    from moored.analysis.models import Device
    from moored.analysis.report_page import check_can_draw, check_can_write

    if html is not None:
        check_can_draw()
        check_can_write(html, "--html")
    if by_turn and turn is not None:
        raise ConfigError("--by-turn measures every turn, --turn one alone; give one of them")
    served = _server(endpoint, tokenizer, api_key_env, concurrency, timeout)
    sizes = LookOptions(
        num_prompts=num_prompts,
        num_pairs=num_pairs,
        window=window,
        skip_bad=skip_bad,
        max_tokens=max_tokens,
        draws=draws,
        seed=seed,
    )
    reading = _read_options(reader, tags, whole, turn, reward, columns, group)
    has_page, where = html is not None, Device(device, dtype)
    request = Request(paths, model, temperature, where, served, reading, sizes, by_turn, has_page)
    found = _answer(request, rescore=rescore)
    _present(found, list(map(str, paths)), html=html, as_json=as_json)
    if check:
        raise typer.Exit(EXIT_CODES[found.verdict])


def _read_options(
    reader: str | None,
    tags: tuple[str, str],
    whole: bool,
    turn: int | None,
    reward: Sequence[str] | None,
    columns: Sequence[str] | None,
    group: str | None,
) -> ReadOptions:
    from moored.files.records import ReadOptions, parse_columns, parse_weights

    return ReadOptions(
        reader=reader,
        tags=tags,
        whole=whole,
        turn=turn,
        rewards=parse_weights(reward or ()),
        columns=parse_columns(columns or (), group=group),
    )


def _server(
    url: str | None,
    tokenizer: str | None,
    api_key_env: str | None,
    concurrency: int,
    timeout_s: float,
) -> Callable[[str], Scorer] | None:
    """What makes a scorer of the name of a model behind a server; None without a server."""
    if url is None:
        return None
    from moored.analysis.scorers import endpoint_scorer
    from moored.engine.endpoint.sampler import read_api_key

    return partial(
        endpoint_scorer,
        url,
        tokenizer=tokenizer,
        api_key=read_api_key(api_key_env),
        concurrency=concurrency,
        timeout_s=timeout_s,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    paths: Sequence[Path]
    model: str | None
    temperature: float | None
    where: Device
    server: Callable[[str], Scorer] | None
    reading: ReadOptions
    options: LookOptions
    by_turn: bool | None
    has_page: bool


def _answer(request: Request, *, rescore: bool) -> Diagnosis:
    """What training measured, for a run directory; else the files are scored."""
    from moored.analysis.compare import lost_sentence
    from moored.analysis.models import find_run
    from moored.analysis.stored import has_looks, read_diagnosis, why_no_looks
    from moored.files.tables import expand, is_run
    from moored.runlog.log import read_records

    paths = request.paths
    run = paths[0] if len(paths) == 1 and is_run(paths[0]) else None
    asks_for_scores = rescore or request.model is not None or request.server is not None
    if run is not None and not asks_for_scores and not has_looks(run):
        typer.echo(f"{why_no_looks(run)}: scoring afresh", err=True)
        asks_for_scores = True
    if run is None or asks_for_scores:
        found = _score(request, expand(paths))
    else:
        _refuse_options_of_scoring(request)
        found = read_diagnosis(run)
        found = _with_closeups(request, found, run) if request.has_page else found
    run = find_run(paths)
    lost = None if run is None else lost_sentence(read_records(run))
    return found if lost is None else replace(found, warnings=(*found.warnings, lost))


def _refuse_options_of_scoring(request: Request) -> None:
    """Options that would have no effect on what training measured."""
    plain = type(request.reading)(reader=request.reading.reader)
    options = request.options
    given = {
        "--window": options.window is not None,
        "--prompts": options.num_prompts is not None,
        "--max-tokens": options.max_tokens is not None,
        "--temperature": request.temperature is not None,
        "--by-turn": bool(request.by_turn),
        "--turn, --tags, --whole, --columns and --reward": request.reading != plain,
    }
    wrong = next((name for name, is_given in given.items() if is_given), None)
    if wrong is not None:
        raise ConfigError(
            f"{wrong} would change nothing: of a run, what training measured is shown; add "
            f"--rescore to score its rollouts afresh"
        )


def _with_closeups(request: Request, found: Diagnosis, run: Path) -> Diagnosis:
    """Score first turns of the first and the last stored rollouts, for the page to show."""
    from moored.files.tables import expand

    first_turns = replace(request, reading=replace(request.reading, turn=1), by_turn=False)
    try:
        files = expand([run])
        scored = _score(first_turns, [files[0], *files[-1:]][: len(files)])
    except MooredError as error:
        return replace(found, warnings=(*found.warnings, f"no close-ups: {error}"))
    return found.with_closeups(scored.closeups)


def _score(request: Request, files: Sequence[Path]) -> Diagnosis:
    """Read the files, load models, score."""
    from moored.analysis.diagnose import Meter, diagnose, draw, plan, read_files

    reading, by_turn = request.reading, request.by_turn
    with make_console(stderr=True).status("reading") as status:
        drawn = draw(read_files(files, reading, status.update), request.options)
    if by_turn and drawn.num_turns == 1:
        raise ConfigError(
            "--by-turn needs episodes of several turns, as runs of moored and lists of messages "
            "hold them"
        )
    if by_turn is None:
        by_turn = request.has_page and drawn.num_turns > 1
    scorers = _scorers(request)
    base = scorers.at(max((look.step or 0 for look in drawn.looks), default=None))
    planned = plan(drawn, base, request.options, by_turn=by_turn)
    what = counted(len(drawn.looks), "look") + (" and each turn of the last" if by_turn else "")
    with _progress(planned, base, scorers, what) as on_request:
        found = diagnose(
            drawn,
            scorers,
            request.options,
            meter=Meter(on_request),
            by_turn=by_turn,
            view=f"turn_{reading.turn}" if (reading.turn or 1) > 1 else None,
            closeups=request.has_page,
        )
    return replace(found, warnings=tuple(_warnings(request, files, scorers, found)))


def _scorers(request: Request) -> Scorers:
    from moored.analysis.models import (
        find_run,
        guess_model,
        model_scorers,
        read_run_config,
        run_scorers,
    )
    from moored.analysis.scorers import Scorers

    run, server = find_run(request.paths), request.server
    temperature = request.temperature
    if temperature is None:
        temperature = 1.0 if run is None else read_run_config(run).rollout.temperature
    if server is None and request.model is None and run is not None:
        return run_scorers(run, temperature, request.where)
    if server is None:
        model = request.model or guess_model(request.paths)
        return model_scorers(model, temperature, request.where)
    if temperature != 1.0:
        raise ConfigError(
            f"a server gives log-probabilities at temperature 1, not {temperature:g}; score with "
            f"a local model, or give --temperature 1"
        )
    if request.model is None:
        raise ConfigError("name the model that the server knows: --model NAME")
    return Scorers.single(server(request.model))


def _warnings(
    request: Request, files: Sequence[Path], scorers: Scorers, found: Diagnosis
) -> Iterator[str]:
    from moored.analysis.models import find_run, late_model_warning
    from moored.analysis.stored import followed_views
    from moored.files.columns import several_rewards
    from moored.files.formats import unclear_rewards

    looks = (look for series in found.series for look in series.looks)
    late = late_model_warning(scorers, sorted({step for look in looks for step in look.steps}))
    if late is not None:
        yield late
    run, turn = find_run(request.paths), request.reading.turn
    swaps = [] if run is None or turn is None else sorted(followed_views(run))
    for view in [view for view in swaps if view.endswith("_swap")][:1]:
        yield (
            f"only turn {turn} is scored afresh; training judged all turns by "
            f"{view.replace('_', ' ')}, see: moored diagnose {shlex.quote(str(run))}"
        )
    unclear = unclear_rewards(files[0], request.reading)
    if unclear:
        yield f"rewards are not shown: {files[0].name!r} {several_rewards(unclear)}"


@contextmanager
def _progress(
    planned: Meter, base: Scorer, scorers: Scorers, what: str
) -> Iterator[Callable[[], None]]:
    """Say what scoring costs, and show progress when it takes a while."""
    from rich.progress import Progress

    from moored.analysis.diagnose import predict_seconds

    console, seconds = make_console(stderr=True), predict_seconds(planned, base)
    print_line(
        console,
        f"scoring {what} with {scorers.name} at temperature {scorers.temperature:g}: "
        f"{planned.token_forwards:,} token-forwards, about {seconds:.1f} s",
    )
    shown = console.is_terminal and seconds > SHOW_AFTER_S
    with Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("scoring", total=planned.num_requests)
        yield lambda: bar.advance(task)


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
