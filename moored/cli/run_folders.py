"""Run directories on the command line: new ones, those to go on with, and a stop at the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

import typer

from moored.cli.stopping import StopRequest
from moored.errors import ConfigError, MooredError, RunLogError
from moored.names import file_of

if TYPE_CHECKING:
    from moored.config import Options

T = TypeVar("T")


def claim_folder(name: str) -> Path:
    """Make the first of runs/NAME, runs/NAME-2, … that does not exist."""
    number = 1
    while True:
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunLogError(
                f"cannot make the run directory {str(path)!r}: {error.strerror}; choose another "
                f"with --run"
            ) from error
        else:
            return path


@contextmanager
def new_folder(given: Path | None, name: str) -> Iterator[Path]:
    """The folder that was asked for, else runs/NAME, numbered; none is left behind by a failure."""
    folder = given or claim_folder(name)
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # only an empty folder can be removed
            folder.rmdir()
        raise


def check_is_run(folder: Path, command: str, *, other: Path | None = None) -> None:
    """Refuse to go on with what is not a run directory, or in another folder."""
    if other is not None:
        raise ConfigError(
            f"--resume goes on in {str(folder)!r} itself; leave --run {str(other)!r} out"
        )
    file = folder / "config.yaml"
    if not file.is_file():
        raise RunLogError(
            f"{str(folder)!r} is not a run directory: it has no config.yaml; give the folder that "
            f"`moored {command}` printed"
        )
    text = file.read_text(errors="replace")
    if not text.strip():
        raise RunLogError(
            f"{str(file)!r} is empty, and a run cannot be resumed without its options; copy them "
            f"back, or start a new run"
        )
    # Only a run of training has no such key.
    if command != "train" and not text.startswith("command: "):
        raise RunLogError(
            f"{str(folder)!r} is not a run of `moored {command}`; for one of `moored train`: "
            f"moored train --resume {quote(str(folder))}"
        )


@contextmanager
def explain_moved_paths(run: Path, config: Options) -> Iterator[None]:
    """Let errors say how files of a run that were moved are named anew."""
    try:
        yield
    except MooredError as error:
        gone = [f"{name}=…" for name in _gone(config.model_dump())]
        if not gone:
            raise
        again = " ".join(["moored", config.command, "--resume", quote(str(run)), *gone])
        raise ConfigError(f"{error}; if it was moved, say where it is now: {again}") from error


def _gone(options: Mapping[str, object] | Sequence[object]) -> Iterator[str]:
    """Dotted names of the absolute paths of which there is no file."""
    for name, value in options.items() if isinstance(options, Mapping) else enumerate(options):
        if isinstance(value, Mapping | list):
            yield from (f"{name}.{inner}" for inner in _gone(value))
        elif isinstance(value, str) and os.path.isabs(value) and not os.path.exists(file_of(value)):
            yield str(name)


def start_or_stop(stop: StopRequest, start: Callable[[], T]) -> T:
    """What `start` returns; Ctrl-C while it works ends the command, later after a step."""
    try:
        made = start()
    except KeyboardInterrupt:
        typer.echo("stopped before the first step", err=True)
        raise typer.Exit(stop.exit_code) from None
    stop.wait_for_step()
    return made


def stopped_at_once(folder: Path) -> str:
    """Why a run ended that did not wait for its step, and from where it goes on."""
    from moored.engine.checkpoint import checkpoint_step, newest_checkpoint

    try:
        step = checkpoint_step(newest_checkpoint(folder))
    except RunLogError:
        return "stopped at once; there is no checkpoint yet, so it begins again"
    return f"stopped at once; it goes on after the checkpoint of step {step}"
