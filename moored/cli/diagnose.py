"""`moored diagnose`: had a run collapsed? From rollout files of any trainer."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console
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


def diagnose_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", help="Rollout files, or folders of them, such as a run directory."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="What scores: see `moored models`, or its name at --endpoint; default: the run's."
        ),
    ] = None,
    reader: Annotated[
        str | None,
        typer.Option(help="moored, trl, verl or jsonl; default: by looking at the file."),
    ] = None,
    tags: Annotated[
        tuple[str, str], typer.Option(metavar="OPEN CLOSE", help="What stands around reasoning.")
    ] = THINK_TAGS,
    whole: Annotated[
        bool, typer.Option("--whole", help="Take replies without tags as reasoning throughout.")
    ] = False,
    turn: Annotated[int, typer.Option(help="Turn of each episode (own runs).", min=1)] = 1,
    reward: Annotated[
        list[str] | None, typer.Option(help="Column with a reward; several are summed.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad rows, go on.")] = False,
    window: Annotated[int, typer.Option(help="Steps pooled into one look.", min=1)] = 1,
    num_prompts: Annotated[
        int | None,
        typer.Option("--prompts", help="N; default: as many as a step has, 16 at most.", min=2),
    ] = None,
    num_pairs: Annotated[int, typer.Option("--pairs", help="M, reasonings a look.", min=2)] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(help="Score no more of each reasoning.", min=1)
    ] = None,
    draws: Annotated[int, typer.Option(help="For intervals and p-values.", min=0)] = 1000,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="OpenAI-compatible server: http://host:8000/v1."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For text at --endpoint: a folder or hub id.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variable with its key; default OPENAI_API_KEY."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to it at a time.", min=1)] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds it may take for a reply.")] = 300.0,
    by_turn: Annotated[
        bool | None,
        typer.Option(
            "--by-turn/--no-by-turn",
            help="Measure each turn of the last step too (own runs); default: with --html.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write a page to look at, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Tell from rollouts whether reasoning still depends on its prompt."""
    from moored.analysis.diagnosis import choose_num_prompts, diagnose, make_plan
    from moored.analysis.page import check_can_write, write_page
    from moored.analysis.sample import draw
    from moored.analysis.turns import draw_turns, plan_turns
    from moored.files.records import ReadOptions
    from moored.files.tables import expand

    if num_prompts is not None and num_pairs < num_prompts:
        raise ConfigError(f"--pairs must be at least --prompts, got {num_pairs} and {num_prompts}")
    if html is not None:
        check_can_write(html)
    options = ReadOptions(tags=tags, whole=whole, turn=turn, rewards=tuple(reward or ()))
    name = model or _own_model(paths)
    source = _Source(files=expand(paths), reader=reader, options=options)
    wants_turns = _wants_turns(by_turn, html, source)
    draw_rows = partial(draw, num_pairs=num_pairs, window=window, skip_bad=skip_bad, seed=seed)
    with source.rows() as rows:
        drawn = draw_rows(rows, num_prompts=num_prompts or min(MOST_PROMPTS, num_pairs))
    chosen_prompts = choose_num_prompts(drawn, num_prompts)
    draw_rows = partial(draw_rows, num_prompts=chosen_prompts)
    if endpoint is None:
        scorer = _local_scorer(name, device, dtype)
    else:
        scorer = _endpoint_scorer(endpoint, name, tokenizer, api_key_env, concurrency, timeout)
    plan = make_plan(
        drawn, scorer, num_prompts=chosen_prompts, num_pairs=num_pairs, max_tokens=max_tokens
    )
    if wants_turns:
        step = plan.steps[-1].draw.step
        turns = draw_turns(partial(_draw_turn, source, step, window, draw_rows), step, turn=turn)
        plan = plan_turns(
            plan, turns, scorer, turn=turn, num_pairs=num_pairs, max_tokens=max_tokens
        )
    with _progress(plan, scorer) as on_column:
        found = diagnose(
            plan,
            drawn,
            scorer,
            draws=draws,
            seed=seed,
            closeups=html is not None,
            on_column=on_column,
        )
    about = {"files": list(map(str, paths)), "model": scorer.name}
    if as_json:
        print(json.dumps(about | {"window": window} | found.to_dict(), indent=2))
    else:
        _show(found)
    if html is not None:
        write_page(html, found, **about)
        typer.echo(f"page: {html}", err=True)


def _draw_turn(
    source: _Source, step: int | None, window: int, draw_rows: Callable[..., Draw], turn: int
) -> Draw:
    with source.of_turn(turn, step, window).rows() as rows:
        return draw_rows(rows)


def _wants_turns(by_turn: bool | None, html: Path | None, source: _Source) -> bool:
    if by_turn and not source.tells_turns():
        raise ConfigError("--by-turn needs files that hold a row a turn, as runs of moored do")
    return by_turn if by_turn is not None else html is not None and source.tells_turns()


def _own_model(paths: list[Path]) -> str:
    """The model that a run directory ended with."""
    folders = [path / "model" for path in paths if (path / "model" / "config.json").is_file()]
    if len(folders) != 1:
        raise ConfigError("name the model that wrote the rollouts: --model FOLDER or org/name")
    return str(folders[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Files, how they are read, and which steps they were seen to hold."""

    files: list[Path]
    reader: str | None
    options: ReadOptions
    steps: dict[Path, set[int | None]] = field(default_factory=dict)

    @contextmanager
    def rows(self) -> Iterator[Iterator[Record | BadRow]]:
        """All rows of all files; a line on the terminal says how far it is."""
        from moored.files.readers import read_rows
        from moored.files.records import Record

        def rows() -> Iterator[Record | BadRow]:
            num_rows = 0
            for file in self.files:
                steps = self.steps.setdefault(file, set())
                for row in read_rows(file, self.options, self.reader):
                    num_rows += 1
                    if num_rows % 1000 == 0:
                        status.update(f"reading {file.name}, {num_rows:,} rows")
                    if isinstance(row, Record):
                        steps.add(row.step)
                    yield row

        with make_console(stderr=True).status("reading") as status:
            yield rows()

    def tells_turns(self) -> bool:
        """True when all files hold a row a turn."""
        from moored.files.readers import find_reader

        return all((self.reader or find_reader(file)) == "moored" for file in self.files)

    def of_turn(self, turn: int, step: int | None, window: int) -> _Source:
        """Another turn, from those files alone that hold a step (or window of steps)."""
        wanted = {None} if step is None else set(range(step, step + window))
        files = [file for file, steps in self.steps.items() if steps & wanted]
        return replace(self, files=files, options=replace(self.options, turn=turn), steps={})


def _local_scorer(name: str, device: str, dtype: str) -> Scorer:
    try:
        from moored.engine.build import pick_device, uses_bf16
    except ImportError as error:
        raise MooredError(
            "scoring needs a model in this process (pip install 'moored[train]') or behind a "
            "server (--endpoint)"
        ) from error
    from moored.analysis.scorers import local_scorer
    from moored.names import check_name

    check_name("dtype", dtype, ("auto", "float32", "bfloat16"))
    place = pick_device(device)
    return local_scorer(name, place, bf16=uses_bf16(dtype, place))


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
    """Say what scoring costs, then show how far it is where that takes a while."""
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
    from moored.analysis.table import curve_table, step_table, summary, turn_table

    console = make_console()
    several = len(found.looks) > 1
    console.print(curve_table(found, console.width) if several else step_table(found.looks[0]))
    if found.turns:
        console.print(turn_table(found, console.width))
    for line in summary(found):
        console.print(line, highlight=False)
