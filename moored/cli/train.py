"""`moored train`: check a configuration, build the run, and show the loop while it works."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console
from moored.cli.options import ConfigWords, check_config, read_config, split_words
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.train import Run, StepRecord

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers and `kill` send."""


def train_command(
    what: ConfigWords = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/PRESET, numbered.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")
    ] = None,
) -> None:
    """Train an agent; Ctrl-C stops after the step, saves, and says how to go on."""
    made = _start(what or [], run) if resume is None else _resume(what or [], resume)
    _run_loop(made)


def _start(words: Sequence[str], folder: Path | None) -> Run:
    from moored.runlog.log import check_folder

    config = read_config(words)
    folder = folder or _free_folder(split_words(words)[0])
    check_folder(folder)
    check_config(config)
    # Only now, because they import torch.
    from moored.train import build_run, start

    made = build_run(config, folder)
    start(made)
    return made


def _resume(words: Sequence[str], folder: Path) -> Run:
    from moored.config import load_config
    from moored.runlog.log import check_folder

    presets, overrides = split_words(words)
    if presets:
        raise ConfigError(f"--resume takes options only, got {presets[0]!r}; leave it out")
    config = load_config(folder / "config.yaml", overrides)
    check_folder(folder, resume=True)
    check_config(config)
    from moored.train import build_run, resume

    made = build_run(config, folder, resume=True)
    resume(made)
    return made


def _free_folder(presets: Sequence[str]) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist."""
    name = "-".join(Path(preset).stem for preset in presets) or "run"
    number = 1
    while (path := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


class _StopRequest:
    """True after the first Ctrl-C or SIGTERM; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self.is_made = False

    def __enter__(self) -> _StopRequest:
        self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, *_: object) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
        # Not through a console or stream: the signal may have come in the middle of its printing.
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")


def _run_loop(run: Run) -> None:
    """Train to the end or until asked to stop; say where the results are and how to go on."""
    from moored.cli.profiling import profiled
    from moored.cli.progress import StepProgress
    from moored.train import train

    console = make_console()
    tables = []
    with ExitStack() as stack:
        stack.callback(run.close)
        stop = stack.enter_context(_StopRequest())
        bar = StepProgress(console, run.config.num_steps, run.next_step - 1)
        watchers = [stack.enter_context(bar).show]
        if run.config.profile:
            profile = stack.enter_context(profiled(run.log.path / "trace.json"))
            watchers.append(profile.see)
            stack.callback(lambda: tables.append(profile.table()))

        def on_step(record: StepRecord) -> bool:
            for see in watchers:
                see(record)
            return stop.is_made

        try:
            reason = f"{train(run, on_step)}\nmodel: {run.log.path / 'model'}"
        except KeyboardInterrupt:
            reason = "stopped at once; the step in flight is lost"
    for table in tables:
        console.print(table)
    console.print(f"{reason}\nrun directory: {run.log.path}", markup=False)
    if stop.is_made:
        console.print(f"go on with: moored train --resume {run.log.path}", markup=False)
