"""`moored train`: check a configuration, build the run, and show the loop while it works.

Exit codes beyond those of every command: 130 when Ctrl-C stopped the run, 143 when SIGTERM did.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import make_console, print_line
from moored.cli.options import ConfigWords, check_config, read_config, split_words
from moored.cli.report import write_or_explain
from moored.cli.run_folders import (
    check_is_run,
    explain_moved_paths,
    new_folder,
    start_or_stop,
    stopped_at_once,
)
from moored.cli.stopping import StopRequest
from moored.engine.build import require_run_packages
from moored.engine.workers.ranks import started_rank, typed_command
from moored.errors import ConfigError

if TYPE_CHECKING:
    from moored.config import Config
    from moored.train import Run, StepRecord


def train_command(
    context: typer.Context,
    what: ConfigWords = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/PRESET, numbered.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")
    ] = None,
    report: Annotated[
        bool, typer.Option(help="Write RUN/report.html when the run is complete.")
    ] = True,
) -> None:
    """Train an agent.

    Start with an environment and an algorithm: `moored train sokoban grpo`. `moored presets` lists
    what there is; options such as num_steps=50 follow. Ctrl-C and SIGTERM stop after the step,
    save, and say how to go on.
    """
    if not what and resume is None:
        _show_help(context)
        raise typer.Exit(2)
    with StopRequest() as stop:
        words = what or []
        made = start_or_stop(
            stop, lambda: _start(words, run) if resume is None else _resume(words, resume, run)
        )
        _run_loop(made, stop)
        folder = made.log.path
        if report:
            write_or_explain(
                [folder], folder / "report.html", f"moored report {quote(str(folder))}"
            )
        _leave_if_stopped_early(made)


def _leave_if_stopped_early(run: Run) -> None:
    """With a last line and an exit code that tell a run that stopped itself from a whole one."""
    from moored.runlog.log import STOPPED_EARLY

    if reason := _early_reason(run):
        steps = f"step {run.next_step - 1} of {run.config.num_steps}"
        print_line(make_console(), f"stopped early, after {steps}: {reason}")
        # torchrun reports any code but 0 as the failure of a rank.
        raise typer.Exit(STOPPED_EARLY if started_rank() is None else 0)


def _early_reason(run: Run) -> str:
    """Why the run stopped itself before its last step; empty where it did not."""
    from moored.training.stopping import stop_reason

    return stop_reason(run.config, run.state) if run.next_step <= run.config.num_steps else ""


def _show_help(context: typer.Context) -> None:
    from moored.presets import describe_presets

    typer.echo(context.get_help())
    presets = describe_presets()
    width = max(map(len, presets))
    typer.echo("\nPresets:")
    for name, summary in presets.items():
        typer.echo(f"  {name:<{width}}  {summary}")


def _start(words: Sequence[str], folder: Path | None) -> Run:
    from moored.runlog.log import check_folder

    config = read_config(words)
    if folder is not None:
        check_folder(folder)
    check_config(config)
    require_run_packages(config)
    with new_folder(folder, _run_name(split_words(words)[0])) as path:
        # Only now, because they import torch.
        from moored.train import build_run, start

        made = build_run(config, path)
    with _closed_on_error(made):
        start(made, command=_command())
    return made


def _resume(words: Sequence[str], folder: Path, other: Path | None) -> Run:
    from moored.config import load_config
    from moored.models.paths import resolve_paths
    from moored.models.rates import with_rates
    from moored.runlog.changes import changes_since
    from moored.runlog.log import check_folder

    presets, overrides = split_words(words)
    if presets:
        raise ConfigError(f"--resume takes options only, got {presets[0]!r}; leave it out")
    check_is_run(folder, "train", other=other)
    config = with_rates(resolve_paths(load_config(folder / "config.yaml", overrides)))
    changes = changes_since(folder, config)
    check_folder(folder, resume=True)
    _check_goes_on(folder, config)
    with explain_moved_paths(folder, config):
        check_config(config)
    require_run_packages(config)
    from moored.analysis.compare import option_cell
    from moored.train import build_run, resume

    made = build_run(config, folder, resume=True)
    with _closed_on_error(made):
        resume(made, command=_command())
    for name, change in changes.items():
        old, new = (option_cell(value) for value in change.values())
        print(f"changed: {name} from {old} to {new}")
    return made


def _check_goes_on(folder: Path, config: Config) -> None:
    """Leave where all steps are done and only the model was kept; raise where more are wanted."""
    from moored.engine.checkpoint import has_only_model
    from moored.runlog.log import all_done, read_records

    if not has_only_model(folder):
        return
    done, model = len(read_records(folder)), str(folder / "model")
    if done < config.num_steps:
        raise ConfigError(
            f"{str(folder)!r} has done its {done} steps and kept only its model "
            f"(keep_checkpoints=0); train on from that: model={quote(model)}"
        )
    print(all_done(done))
    print_line(make_console(), f"model: {model}")
    raise typer.Exit


@contextmanager
def _closed_on_error(run: Run) -> Iterator[None]:
    """Nothing that the run has started stays behind when it cannot begin."""
    try:
        yield
    except BaseException:
        run.close()
        raise


def _command() -> list[str]:
    """What was typed; the program without its path."""
    return [*typed_command().split(), *sys.argv[1:]]


def _run_name(presets: Sequence[str]) -> str:
    names = (Path(preset).name.removesuffix(".yaml").removesuffix(".yml") for preset in presets)
    return "-".join(names) or "run"


def _run_loop(run: Run, stop: StopRequest) -> None:
    """Train to the end or until asked to stop; say where the results are and how to go on."""
    from moored.analysis.trend import no_progress
    from moored.cli.profiling import profiled
    from moored.cli.progress import StepProgress, header_lines
    from moored.runlog.log import read_records
    from moored.train import train

    console = make_console()
    is_cut, tables = False, []
    with ExitStack() as stack:
        stack.callback(run.close)
        print_line(console, "\n".join(header_lines(run)))
        bar = StepProgress(console, run.config, run.next_step - 1)
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
            reason = train(run, on_step)
        except KeyboardInterrupt:
            is_cut, reason = True, stopped_at_once(run.log.path)
    for table in tables:
        console.print(table)
    is_early = bool(_early_reason(run))
    lines = ([] if is_early else [reason]) + (
        [] if is_cut else [f"model: {run.log.path / 'model'}"]
    )
    print_line(console, "\n".join([*lines, f"run directory: {run.log.path}"]))
    if stalled := no_progress(read_records(run.log.path), run.config.num_steps):
        print_line(console, stalled)
    if bar.has_collapsed:
        why = f"moored diagnose {quote(str(run.log.path))}"
        print_line(console, f"collapsed; since when, and what to do: {why}")
    if is_cut or (stop.is_made and run.next_step <= run.config.num_steps and not is_early):
        again = f"{typed_command()} train --resume {quote(str(run.log.path))}"
        print_line(console, f"go on with: {again}")
        raise typer.Exit(stop.exit_code)
