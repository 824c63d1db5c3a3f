"""The `moored` command. Each command imports what it needs when it runs, so `--help` is quick.

Exit codes: 0 fine, 1 a check failed, 2 something the user can mend (one line on stderr).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored import __version__
from moored.cli import advise, diagnose, train
from moored.errors import ConfigError, MooredError

if TYPE_CHECKING:
    from rich.table import Table

    from moored.envs.check.runner import CheckReport
    from moored.envs.describe import EnvInfo

app = typer.Typer(
    name="moored",
    help="Train multi-turn LLM agents whose reasoning stays moored to its input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

train.register(app)
diagnose.register(app)
advise.register(app)

EnvName = Annotated[str, typer.Argument(help="A name from `moored envs`, or module:Class.")]
EnvOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="An option of the environment, such as max_turns=8; may be given several times.",
    ),
]
NARROW = 70
"""Columns below which a table of environments cannot be read."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def main() -> None:
    """Entry point: run a command; errors the user can mend become one line and exit code 2."""
    try:
        app()
    except MooredError as error:
        print(f"moored: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moored {__version__}")
        raise typer.Exit


@app.callback()
def _moored(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command("envs")
def envs_command(as_json: AsJson = False) -> None:
    """List the environments."""
    from moored.envs import ENVIRONMENTS
    from moored.envs.describe import describe_env

    infos = [describe_env(name) for name in ENVIRONMENTS]
    if as_json:
        print(json.dumps([_info_dict(info) for info in infos], indent=2, default=repr))
    else:
        _print_envs(infos)


@app.command("play")
def play_command(
    name: EnvName,
    seed: Annotated[int, typer.Option(help="Task seed.")] = 0,
    episode: Annotated[int, typer.Option(help="Episode seed: the noise, where there is any.")] = 0,
    oracle: Annotated[bool, typer.Option("--oracle", help="Let the oracle play.")] = False,
    image: Annotated[
        bool, typer.Option("--image", help="Play in pictures; save them, each game in a folder.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where --image saves; frames/ if not given."),
    ] = None,
    option: EnvOptions = None,
) -> None:
    """Play an environment with the text the model gets; Ctrl-D leaves."""
    from rich.console import Console

    from moored.cli.play import ask_in_terminal, new_game_folder, play_episode
    from moored.envs.mix import make_env

    if folder is not None and not image:
        raise ConfigError(f"a folder ({folder}) is for pictures only; add --image")
    _let_import_from_here(name)
    options = parse_options(option or [])
    if image:
        options = _with_pictures(name, options)
    with closing(make_env(name, **options)) as env:
        play_episode(
            env,
            Console(),
            task_seed=seed,
            episode_seed=episode,
            ask=None if oracle else ask_in_terminal,
            image_dir=new_game_folder(folder or Path("frames")) if image else None,
        )


@app.command("check-env")
def check_env_command(name: EnvName, option: EnvOptions = None, as_json: AsJson = False) -> None:
    """Check that an environment keeps the rules training relies on."""
    from rich.console import Console

    from moored.envs.check.runner import check_env

    _let_import_from_here(name)
    with Console(stderr=True).status("checking") as status:
        report = check_env(
            name,
            options=parse_options(option or []),
            progress=lambda check: status.update(f"checking {check}"),
        )
    if as_json:
        print(json.dumps(_report_dict(report), indent=2))
    else:
        _print(_report_table(report))
        print(_verdict(report))
    if not report.ok:
        raise typer.Exit(1)


def parse_options(pairs: list[str]) -> dict[str, object]:
    """Read `key=value` pairs; values are JSON or YAML: 8, 0.5, true, [1, 2], text."""
    from moored.config import parse_value

    options: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"an option must look like key=value, got {pair!r}")
        options[key.strip()] = parse_value(value, pair)
    return options


def _with_pictures(name: str, options: dict[str, object]) -> dict[str, object]:
    """Ask for the image view, where there are views and none was chosen."""
    from moored.envs import ENVIRONMENTS
    from moored.envs.mix import option_defaults

    factory = ENVIRONMENTS.get_object(name)
    has_views = callable(factory) and "view" in option_defaults(factory)
    return {"view": "image", **options} if has_views else options


def _let_import_from_here(name: str) -> None:
    """Find the user's `module:Class` in the folder the command was started in."""
    if ":" in name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _print_envs(infos: list[EnvInfo]) -> None:
    """A table, or on a narrow terminal one paragraph for each."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding

    console = Console()
    if console.width >= NARROW:
        console.print(_envs_table(infos))
        return
    for info in infos:
        turns = "1 turn" if info.max_turns == 1 else f"{info.max_turns} turns"
        console.print(f"[bold]{info.name}[/] · {turns}", highlight=False)
        needs = ["Needs: " + ", ".join(map(_short_extra, info.extras))] if info.extras else []
        for text in (info.summary, f"Reward: {info.reward}", *needs):
            console.print(Padding(escape(text), (0, 0, 0, 2)), highlight=False)


def _short_extra(extra: str) -> str:
    """`images` for `moored[images]`."""
    return extra.partition("[")[2].rstrip("]")


def _envs_table(infos: list[EnvInfo]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for column, share in (("name", 0), ("turns", 0), ("task", 4), ("reward", 5), ("needs", 0)):
        table.add_column(column, ratio=share or None, no_wrap=not share)
    for info in infos:
        extras = "\n".join(map(_short_extra, info.extras))
        cells = (info.summary, info.reward, extras or "–")
        table.add_row(f"[bold]{info.name}[/]", str(info.max_turns), *map(escape, cells))
    return table


def _info_dict(info: EnvInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "max_turns": info.max_turns,
        "is_stochastic": info.is_stochastic,
        "summary": info.summary,
        "reward": info.reward,
        "needs": list(info.extras),
        "options": dict(info.options),
    }


def _report_table(report: CheckReport) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    marks = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "skipped": "[yellow]–[/]"}
    table = Table("", "check", "seen", box=box.SIMPLE_HEAD, header_style="bold")
    for check in report.checks:
        seen = escape(check.detail)
        if check.status == "failed":
            seen = f"[bold]{escape(check.claim)}[/]\n{seen}"
        table.add_row(marks[check.status], check.name, seen)
    return table


def _report_dict(report: CheckReport) -> dict[str, object]:
    from dataclasses import asdict

    return {"env": report.env, "ok": report.ok, "checks": [asdict(x) for x in report.checks]}


def _verdict(report: CheckReport) -> str:
    if not report.ok:
        names = ", ".join(check.name for check in report.failed)
        return f"{report.env} breaks {len(report.failed)} rule(s): {names}."
    skipped = sum(check.status == "skipped" for check in report.checks)
    note = f" ({skipped} could not be checked)" if skipped else ""
    return f"{report.env} keeps the rules{note}."
