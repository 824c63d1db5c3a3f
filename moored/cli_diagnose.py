"""`moored diagnose`: had a run collapsed? From rollout files of any trainer."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.errors import ConfigError, MooredError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moored.diagnose.diagnosis import Diagnosis, Plan
    from moored.diagnose.records import BadRow, ReadOptions, Record
    from moored.diagnose.scorers import Scorer

MOST_PROMPTS = 16
SHOW_AFTER_S = 2.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diagnose")(diagnose_command)


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
    ] = ("<think>", "</think>"),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Tell from rollouts whether reasoning still depends on its prompt."""
    from moored.diagnose.diagnosis import choose_num_prompts, diagnose, make_plan
    from moored.diagnose.records import ReadOptions
    from moored.diagnose.sample import draw

    if num_prompts is not None and num_pairs < num_prompts:
        raise ConfigError(f"--pairs must be at least --prompts, got {num_pairs} and {num_prompts}")
    options = ReadOptions(tags=tags, whole=whole, turn=turn, rewards=tuple(reward or ()))
    name = model or _own_model(paths)
    with _rows(paths, reader, options) as rows:
        drawn = draw(
            rows,
            num_prompts=num_prompts or min(MOST_PROMPTS, num_pairs),
            num_pairs=num_pairs,
            window=window,
            skip_bad=skip_bad,
            seed=seed,
        )
    chosen_prompts = choose_num_prompts(drawn, num_prompts)
    if endpoint is None:
        scorer = _local_scorer(name, device, dtype)
    else:
        from moored.diagnose.scorers import endpoint_scorer
        from moored.engine.endpoint import read_api_key

        scorer = endpoint_scorer(
            endpoint,
            name,
            tokenizer=tokenizer,
            api_key=read_api_key(api_key_env),
            concurrency=concurrency,
            timeout_s=timeout,
        )
    plan = make_plan(
        drawn, scorer, num_prompts=chosen_prompts, num_pairs=num_pairs, max_tokens=max_tokens
    )
    with _progress(plan, scorer) as on_column:
        found = diagnose(plan, drawn, scorer, draws=draws, seed=seed, on_column=on_column)
    if as_json:
        about = {"files": list(map(str, paths)), "model": scorer.name, "window": window}
        print(json.dumps(about | found.to_dict(), indent=2))
    else:
        _show(found)


def _own_model(paths: list[Path]) -> str:
    """The model that a run directory ended with."""
    folders = [path / "model" for path in paths if (path / "model" / "config.json").is_file()]
    if len(folders) != 1:
        raise ConfigError("name the model that wrote the rollouts: --model FOLDER or org/name")
    return str(folders[0])


@contextmanager
def _rows(
    paths: list[Path], reader: str | None, options: ReadOptions
) -> Iterator[Iterator[Record | BadRow]]:
    """All rows of all files; a line on the terminal says how far it is."""
    from rich.console import Console

    from moored.diagnose.readers import expand, read_rows

    files = expand(paths)

    def rows() -> Iterator[Record | BadRow]:
        num_rows = 0
        for file in files:
            for row in read_rows(file, options, reader):
                num_rows += 1
                if num_rows % 1000 == 0:
                    status.update(f"reading {file.name}, {num_rows:,} rows")
                yield row

    with Console(stderr=True).status("reading") as status:
        yield rows()


def _local_scorer(name: str, device: str, dtype: str) -> Scorer:
    try:
        from moored.build import pick_device, uses_bf16
    except ImportError as error:
        raise MooredError(
            "scoring needs a model in this process (pip install 'moored[train]') or behind a "
            "server (--endpoint)"
        ) from error
    from moored.diagnose.scorers import local_scorer
    from moored.names import check_name

    check_name("dtype", dtype, ("auto", "float32", "bfloat16"))
    place = pick_device(device)
    return local_scorer(name, place, bf16=uses_bf16(dtype, place))


@contextmanager
def _progress(plan: Plan, scorer: Scorer) -> Iterator[Callable[[], None]]:
    """Say what scoring costs, then show how far it is where that takes a while."""
    from rich.console import Console
    from rich.progress import Progress

    from moored.diagnose.diagnosis import predict_seconds

    console = Console(stderr=True)
    seconds = predict_seconds(plan, scorer)
    looks = f"{len(plan.steps)} steps" if len(plan.steps) > 1 else "1 step"
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
    from rich.console import Console

    from moored.diagnose.table import curve_table, step_table, summary

    console = Console()
    several = len(found.looks) > 1
    console.print(curve_table(found, console.width) if several else step_table(found.looks[0]))
    for line in summary(found):
        console.print(line, highlight=False)
