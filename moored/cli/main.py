"""The `moored` command: assembles the commands, one file each, and turns errors into one line.

Each command imports what it needs when it runs, so `--help` is quick. Exit codes: 0 fine, 1 a check
failed, 2 something the user can fix (one line on stderr); `diagnose --check` also 3 and 4, `train`
5 when the run stopped itself before its last step; `train`, `sft` and `study` 130 or 143 when
Ctrl-C or SIGTERM stopped them, and others 130 after Ctrl-C, which is how one leaves `play` and the
servers: they end with 0.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from moored import __version__
from moored.cli.advise import advise_command
from moored.cli.check_env import check_env_command
from moored.cli.compare import compare_command
from moored.cli.config import config_command
from moored.cli.console import printable
from moored.cli.diagnose import diagnose_command
from moored.cli.envs import envs_command
from moored.cli.eval import eval_command
from moored.cli.gradients import gradients_command
from moored.cli.json_output import with_json_alone
from moored.cli.models import models_command
from moored.cli.plan import plan_command
from moored.cli.play import play_command
from moored.cli.presets import presets_command
from moored.cli.report import report_command
from moored.cli.serve_env import serve_env_command
from moored.cli.serve_search import serve_search_command
from moored.cli.sft import sft_command
from moored.cli.stopping import clean_interrupts
from moored.cli.study import study_command
from moored.cli.train import train_command
from moored.errors import MooredError, explain_failure

app = typer.Typer(
    name="moored",
    help="Train multi-turn LLM agents whose reasoning stays moored to its input.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Boxes for people; in a pipe or a log, lines that are not broken at some width.
    rich_markup_mode="rich" if sys.stderr.isatty() else None,
)


def help_text(command: Callable[..., None]) -> str:
    """Its docstring, each paragraph on one line: help wraps it to the width of the terminal."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


for _name, _command in {
    "train": train_command,
    "sft": sft_command,
    "eval": eval_command,
    "plan": plan_command,
    "diagnose": diagnose_command,
    "advise": advise_command,
    "compare": compare_command,
    "gradients": gradients_command,
    "study": study_command,
    "report": report_command,
    "play": play_command,
    "envs": envs_command,
    "check-env": check_env_command,
    "serve-env": serve_env_command,
    "serve-search": serve_search_command,
    "models": models_command,
    "presets": presets_command,
    "config": config_command,
}.items():
    app.command(_name, help=help_text(_command))(with_json_alone(_command))


def main() -> None:
    """Entry point: run a command; errors the user can fix become one line and exit code 2."""
    _print_question_marks()
    _let_import_from_here()
    try:
        with clean_interrupts():
            app(prog_name="moored")
    except MooredError as error:
        print(printable(f"moored: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        explained = explain_failure(error)
        if explained is None:
            raise
        print(printable(f"moored: {explained}"), file=sys.stderr)
        raise SystemExit(2) from None


def _print_question_marks() -> None:
    """For characters that the encoding of the output lacks, instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # Not there when a caller has put a stream of its own in their place, or closed them.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Where its file was exchanged for a pipe, it raises after it has done so.
            with suppress(OSError):
                reconfigure(errors="replace")


def _let_import_from_here() -> None:
    """Let the user's `module:Class` be found in the folder the command was started in.

    Last on the path: a file that happens to be called `random.py` must not replace the module.
    """
    with suppress(FileNotFoundError):  # the folder was deleted
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)


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
