"""`moored diagnose`: did a run collapse? From rollout files of any trainer."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console
from moored.cli.options import (
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
    from collections.abc import Callable, Iterator

    from moored.analysis.diagnosis import Diagnosis, Plan
    from moored.analysis.sample import Draw
    from moored.analysis.scorers import Scorer
    from moored.files.records import BadRow, ReadOptions, Record

MOST_PROMPTS = 16
SHOW_AFTER_S = 2.0


Model = Annotated[
    str | None,
    typer.Option(
        help="What scores: see `moored models`, or its name at --endpoint; default: the run's."
    ),
]
ReasoningTags = Annotated[
    tuple[str, str], typer.Option(metavar="OPEN CLOSE", help="What stands around reasoning.")
]
Whole = Annotated[
    bool, typer.Option("--whole", help="Take replies without tags as reasoning throughout.")
]
TurnNumber = Annotated[
    int, typer.Option(help="Turn of each episode (own runs, message lists).", min=1)
]
Window = Annotated[int, typer.Option(help="Steps pooled into one look.", min=1)]
NumPrompts = Annotated[
    int | None,
    typer.Option("--prompts", help="N; default: as many as a step has, 16 at most.", min=2),
]
NumPairs = Annotated[int, typer.Option("--pairs", help="M, reasonings in each look.", min=2)]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens scored per reasoning.", min=1)]
NumDraws = Annotated[int, typer.Option(help="For intervals and p-values.", min=0)]
TokenizerName = Annotated[
    str | None, typer.Option(help="For text at --endpoint: a folder or hub id.")
]
ByTurn = Annotated[
    bool | None,
    typer.Option(
        "--by-turn/--no-by-turn",
        help="Measure each turn of the last step too (own runs); default: with --html.",
        show_default=False,
    ),
]
Page = Annotated[Path | None, typer.Option(metavar="PAGE", help="Also write an HTML page.")]


def diagnose_command(
    paths: Rollouts,
    model: Model = None,
    reader: Reader = None,
    tags: ReasoningTags = THINK_TAGS,
    whole: Whole = False,
    turn: TurnNumber = 1,
    columns: ColumnNames = None,
    reward: RewardColumns = None,
    group: GroupColumn = None,
    skip_bad: SkipBad = False,
    window: Window = 1,
    num_prompts: NumPrompts = None,
    num_pairs: NumPairs = 64,
    max_tokens: MaxTokens = None,
    draws: NumDraws = 1000,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    endpoint: Endpoint = None,
    tokenizer: TokenizerName = None,
    api_key_env: KeyVariable = None,
    concurrency: Concurrency = 32,
    timeout: Timeout = 300.0,
    by_turn: ByTurn = None,
    html: Page = None,
    as_json: AsJson = False,
) -> None:
    """Tell from rollouts whether reasoning still depends on its prompt."""
    from moored.analysis.diagnosis import choose_num_prompts
    from moored.analysis.page import check_can_write, write_page
    from moored.files.records import ReadOptions, parse_columns, parse_weights
    from moored.files.tables import expand

    if html is not None:
        check_can_write(html)
    reading = ReadOptions(
        reader=reader,
        tags=tags,
        whole=whole,
        turn=turn,
        rewards=parse_weights(reward or ()),
        columns=parse_columns(columns or (), group=group),
    )
    looks = _Looks(num_prompts, num_pairs, window, max_tokens, skip_bad, draws, seed)
    source = _Source(files=expand(paths), reading=reading, looks=looks)
    name = model or _own_model(paths)
    wants_turns = _wants_turns(by_turn, html, source)
    drawn = source.draw()
    source = source.with_prompts(choose_num_prompts(drawn, num_prompts))
    if endpoint is None:
        scorer = _local_scorer(name, device, dtype)
    else:
        scorer = _endpoint_scorer(endpoint, name, tokenizer, api_key_env, concurrency, timeout)
    found = _measure(source, drawn, scorer, wants_turns=wants_turns, closeups=html is not None)
    about = {"files": list(map(str, paths)), "model": scorer.name}
    if as_json:
        print(json.dumps(about | {"window": window} | found.to_dict(), indent=2))
    else:
        _show(found)
    if html is not None:
        write_page(html, found, **about)
        typer.echo(f"page: {html}", err=True)


def _measure(
    source: _Source, drawn: Draw, scorer: Scorer, *, wants_turns: bool, closeups: bool
) -> Diagnosis:
    """Plan what is scored, and score it."""
    from moored.analysis.diagnosis import diagnose, draw_turns, make_plan, plan_turns

    looks, turn = source.looks, source.reading.turn
    assert looks.num_prompts is not None
    size = {"num_pairs": looks.num_pairs, "max_tokens": looks.max_tokens}
    plan = make_plan(drawn, scorer, num_prompts=looks.num_prompts, **size)
    if wants_turns:
        step = plan.steps[-1].draw.step
        turns = draw_turns(lambda number: source.of_turn(number, step).draw(), step, turn=turn)
        plan = plan_turns(plan, turns, scorer, turn=turn, **size)
    drawing = {"draws": looks.draws, "seed": looks.seed}
    with _progress(plan, scorer) as on_column:
        return diagnose(plan, drawn, scorer, closeups=closeups, on_column=on_column, **drawing)


def _wants_turns(by_turn: bool | None, html: Path | None, source: _Source) -> bool:
    if by_turn and not source.tells_turns():
        raise ConfigError(
            "--by-turn needs files with one row per turn, as runs of moored write them"
        )
    return by_turn if by_turn is not None else html is not None and source.tells_turns()


def _own_model(paths: list[Path]) -> str:
    """The model that a run directory ended with."""
    folders = [path / "model" for path in paths if (path / "model" / "config.json").is_file()]
    if len(folders) != 1:
        raise ConfigError("name the model that wrote the rollouts: --model FOLDER or org/name")
    return str(folders[0])


@dataclass(frozen=True, slots=True)
class _Looks:
    """How much each look takes from the files, and how it is measured."""

    num_prompts: int | None
    num_pairs: int
    window: int
    max_tokens: int | None
    skip_bad: bool
    draws: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_pairs < self.num_prompts:
            raise ConfigError(
                f"--pairs must be at least --prompts, got {self.num_pairs} and {self.num_prompts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Files, how they are read, and which steps they hold."""

    files: list[Path]
    reading: ReadOptions
    looks: _Looks
    steps: dict[Path, set[int | None]] = field(default_factory=dict)

    def draw(self) -> Draw:
        """Read all files; a line on the terminal shows the progress."""
        from moored.analysis.sample import draw

        looks = self.looks
        with make_console(stderr=True).status("reading") as status:
            return draw(
                self._rows(status.update),
                num_prompts=looks.num_prompts or min(MOST_PROMPTS, looks.num_pairs),
                num_pairs=looks.num_pairs,
                window=looks.window,
                skip_bad=looks.skip_bad,
                seed=looks.seed,
            )

    def _rows(self, tell: Callable[[str], None]) -> Iterator[Record | BadRow]:
        from moored.files.formats import read_records
        from moored.files.records import Record

        num_rows = 0
        for file in self.files:
            steps = self.steps.setdefault(file, set())
            for row in read_records(file, self.reading):
                num_rows += 1
                if num_rows % 1000 == 0:
                    tell(f"reading {file.name}, {num_rows:,} rows")
                if isinstance(row, Record):
                    steps.add(row.step)
                yield row

    def tells_turns(self) -> bool:
        """True when all files have one row per turn."""
        from moored.files.formats import find_format
        from moored.files.tables import open_table

        names = (self.reading.reader or find_format(open_table(file)) for file in self.files)
        return all(name == "moored" for name in names)

    def with_prompts(self, num_prompts: int) -> _Source:
        """The same, with N fixed."""
        return replace(self, looks=replace(self.looks, num_prompts=num_prompts))

    def of_turn(self, turn: int, step: int | None) -> _Source:
        """Another turn, read only from the files that hold a step (or window of steps)."""
        wanted = {None} if step is None else set(range(step, step + self.looks.window))
        files = [file for file, steps in self.steps.items() if steps & wanted]
        return replace(self, files=files, reading=replace(self.reading, turn=turn), steps={})


def _local_scorer(name: str, device: str, dtype: str) -> Scorer:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MooredError(
            "scoring needs a model in this process (pip install 'moored[train]') or behind a "
            "server (--endpoint)"
        ) from error
    from moored.analysis.scorers import local_scorer

    return local_scorer(name, device, dtype)


def _endpoint_scorer(
    url: str,
    model: str,
    tokenizer: str | None,
    api_key_env: str | None,
    concurrency: int,
    timeout_s: float,
) -> Scorer:
    from moored.analysis.scorers import endpoint_scorer
    from moored.engine.endpoint.sampler import read_api_key

    return endpoint_scorer(
        url,
        model,
        tokenizer=tokenizer,
        api_key=read_api_key(api_key_env),
        concurrency=concurrency,
        timeout_s=timeout_s,
    )


@contextmanager
def _progress(plan: Plan, scorer: Scorer) -> Iterator[Callable[[], None]]:
    """Say what scoring costs, and show progress when it takes a while."""
    from rich.progress import Progress

    from moored.analysis.diagnosis import predict_seconds

    console = make_console(stderr=True)
    seconds = predict_seconds(plan, scorer)
    looks = f"{len(plan.steps)} steps" if len(plan.steps) > 1 else "1 step"
    looks += f" and {len(plan.turns)} other turn(s) of the last" if plan.turns else ""
    pairs = max(len(step.pairs.pairs) for step in plan.steps)
    console.print(
        f"scoring {looks} with {scorer.name}: {plan.num_prompts} prompts × {pairs} reasonings, "
        f"{plan.token_forwards:,} token-forwards, about {seconds:.1f} s",
        highlight=False,
        markup=False,
    )
    shown = console.is_terminal and seconds > SHOW_AFTER_S
    with Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("scoring", total=plan.num_columns)
        yield lambda: bar.advance(task)


def _show(found: Diagnosis) -> None:
    from moored.analysis.findings import curve_table, step_table, summary, turn_table

    console = make_console()
    several = len(found.looks) > 1
    console.print(curve_table(found, console.width) if several else step_table(found.looks[0]))
    if found.turns:
        console.print(turn_table(found, console.width))
    for line in summary(found):
        console.print(line, highlight=False)
