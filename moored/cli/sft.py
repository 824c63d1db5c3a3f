"""`moored sft`: a supervised warm start on demonstrations, before reinforcement learning.

Exit codes beyond those of every command: 130 when Ctrl-C stopped the run, 143 when SIGTERM did.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.console import counted, make_console, print_line
from moored.cli.json_output import print_json
from moored.cli.options import AsJson, split_words
from moored.cli.run_folders import (
    check_is_run,
    explain_moved_paths,
    new_folder,
    start_or_stop,
    stopped_at_once,
)
from moored.cli.stopping import StopRequest
from moored.engine.workers.ranks import typed_command
from moored.errors import ConfigError, close_match_hint

if TYPE_CHECKING:
    from rich.console import Console

    from moored.cli.sft_progress import SftSummary
    from moored.sft.loop import SftRun
    from moored.sft.options import SftConfig

NO_CHECKPOINT = "no checkpoint was found, so the run begins again"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL|FILE|KEY=VALUE]…",
        help="A model (see `moored models`), YAML files, and options: env=sokoban num_steps=500.",
    ),
]


def sft_command(
    context: typer.Context,
    what: Words = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/sft-MODEL, numbered.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Teach a model by demonstration: the warm start.

    `moored sft nano env=sudoku` learns from the oracle's episodes, `dialogues=FILE` from dialogues
    in JSON lines. The model comes out in RUN/model. Ctrl-C and SIGTERM stop after the step and say
    how to go on.
    """
    if not what and resume is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    console = make_console(stderr=as_json)
    with StopRequest() as stop:
        words = what or []
        made = start_or_stop(
            stop,
            lambda: (
                _start(words, run)
                if resume is None
                else _resume_or_stop(stop, words, resume, run, console, as_json=as_json)
            ),
        )
        _run_loop(made, stop, console, as_json=as_json)


def _start(words: Sequence[str], folder: Path | None) -> SftRun:
    from moored.runlog.log import check_folder

    config = read_sft_config(words)
    if folder is not None:
        check_folder(folder)
    config = _checked(config, probe=True)
    with new_folder(folder, f"sft-{Path(config.model).name}") as path:
        # Only now, because they import torch.
        from moored.sft.loop import build_sft, start_sft

        made = build_sft(config, path)
    start_sft(made)
    return made


def _resume_or_stop(
    stop: StopRequest,
    words: Sequence[str],
    folder: Path,
    other: Path | None,
    console: Console,
    *,
    as_json: bool,
) -> SftRun:
    """What `_resume` returns; Ctrl-C while it works ends the command, and the run can go on."""
    try:
        return _resume(words, folder, other, console, as_json=as_json)
    except KeyboardInterrupt:
        typer.echo(f"stopped while the run was loaded; {_how_to_go_on(folder)}", err=True)
        raise typer.Exit(stop.exit_code) from None


def _how_to_go_on(folder: Path) -> str:
    return f"go on with: {typed_command()} sft --resume {quote(str(folder))}"


def _resume(
    words: Sequence[str], folder: Path, other: Path | None, console: Console, *, as_json: bool
) -> SftRun:
    from moored.analysis.compare import option_cell
    from moored.models.paths import resolve_paths
    from moored.runlog.log import check_folder
    from moored.sft.changes import changes_since
    from moored.sft.options import load_sft_config

    plain, overrides = split_words(words)
    if plain:
        raise ConfigError(f"--resume takes options only, got {plain[0]!r}; leave it out")
    check_is_run(folder, "sft", other=other)
    config = resolve_paths(load_sft_config(folder / "config.yaml", overrides))
    changes = changes_since(folder, config)
    check_folder(folder, resume=True)
    _check_goes_on(folder, config, console, as_json=as_json)
    with explain_moved_paths(folder, config):
        _checked(config)
    from moored.sft.loop import build_sft, resume_sft

    made = build_sft(config, folder, resume=True)
    num_lost = resume_sft(made)
    if num_lost:
        is_first = made.next_step == 1
        where = NO_CHECKPOINT if is_first else f"going on after step {made.next_step - 1}"
        print_line(console, f"{where}; {counted(num_lost, 'logged step')} done again")
    for name, change in changes.items():
        old, new = (option_cell(value) for value in change.values())
        print_line(console, f"changed: {name} from {old} to {new}")
    return made


def _check_goes_on(folder: Path, config: SftConfig, console: Console, *, as_json: bool) -> None:
    """Leave where all steps are done and only the model is left; raise where steps are missing.

    Beginning again would write over that model.
    """
    from moored.cli.sft_progress import summarize
    from moored.engine.checkpoint import has_only_model
    from moored.runlog.log import all_done, read_records

    if not has_only_model(folder):
        return
    done = sum(record["step"] != 0 for record in read_records(folder))
    if done < config.num_steps:
        raise ConfigError(
            f"{str(folder)!r} has logged {done} of its {config.num_steps} steps and has no "
            f"checkpoint to go on from, only its model; teach that one in a run of its own: "
            f"{typed_command()} sft {quote(str(folder / 'model'))}"
        )
    _print_result(summarize(folder, done, all_done(done)), console, as_json=as_json)
    raise typer.Exit


def read_sft_config(words: Sequence[str]) -> SftConfig:
    """The options that a model, files and overrides add up to; later files win, key by key."""
    from moored.config_text import read_yaml
    from moored.envs import ENVIRONMENTS
    from moored.presets import preset_kinds, read_presets
    from moored.sft.options import load_sft_config

    plain, overrides = split_words(words)
    data: dict[str, object] = {}
    models = []
    for word in plain:
        if word.endswith((".yaml", ".yml")):
            data |= read_yaml(word)
        elif word in ENVIRONMENTS:
            raise ConfigError(f"{word!r} is an environment, not a model; write env={word}")
        elif preset_kinds().get(word) == "model":
            models.append(str(read_presets([word])["model"]))
        else:
            _check_is_no_misspelt_preset(word)
            models.append(word)
    if len(models) > 1:
        raise ConfigError(f"one model can be taught at a time, got {' and '.join(models)}")
    if models:
        data["model"] = models[0]
        given = [word for word in overrides if word.startswith("model=")]
        if given:
            raise ConfigError(
                f"the model is {models[0]!r} by its first word and another by {given[0]!r}; leave "
                f"one of them out"
            )
    return load_sft_config(data, overrides)


def _check_is_no_misspelt_preset(word: str) -> None:
    from moored.presets import preset_kinds

    presets = [name for name, kind in preset_kinds().items() if kind == "model"]
    hint = close_match_hint(word, presets)
    if hint.startswith("did you mean") and "/" not in word and not Path(word).exists():
        raise ConfigError(f"{word!r} is neither a model nor a preset of one; {hint}")


def _checked(config: SftConfig, *, probe: bool = False) -> SftConfig:
    """Refuse what cannot run, as far as that is known without importing torch.

    `probe` also tries the oracles, and warns of those that teach nothing.
    """
    from moored.models.find import check_model_name
    from moored.sft.options import settle
    from moored.sft.source import OracleSource, open_source

    check_model_name(config.model)
    config = settle(config)
    with closing(open_source(config)) as source:
        warnings = source.probe() if probe and isinstance(source, OracleSource) else []
    for text in warnings:
        typer.echo(f"moored: {text}", err=True)
    return config


def _run_loop(run: SftRun, stop: StopRequest, console: Console, *, as_json: bool) -> None:
    """Learn to the end or until asked to stop; say what changed, and how to go on."""
    from moored.cli.sft_progress import SftProgress, header_lines, summarize
    from moored.sft.loop import SftRecord, run_sft

    is_cut = False
    with ExitStack() as stack:
        stack.callback(run.close)
        print_line(console, "\n".join(header_lines(run)))
        bar = stack.enter_context(SftProgress(console, run.config.num_steps, run.next_step - 1))

        run.on_replies = bar.on_replies

        def on_step(record: SftRecord) -> bool:
            bar.show(record)
            return stop.is_made

        try:
            reason = run_sft(run, on_step)
        except KeyboardInterrupt:
            is_cut, reason = True, stopped_at_once(run.log.path)
    result = summarize(run.log.path, run.next_step - 1, reason)
    _print_result(result, console, as_json=as_json)
    if is_cut or (stop.is_made and run.next_step <= run.config.num_steps):
        print_line(console, _how_to_go_on(Path(result.run)))
        raise typer.Exit(stop.exit_code)


def _print_result(result: SftSummary, console: Console, *, as_json: bool) -> None:
    """Why the run ended, what changed, and where everything is."""
    from moored.cli.sft_progress import comparison_lines

    print_line(console, "\n".join([result.reason, *comparison_lines(result)]))
    measured = _last_measured(Path(result.run))
    if result.after is not None and measured != result.steps:
        print_line(console, f"after: measured at step {measured}, the last time before the end")
    if result.model is not None:
        print_line(console, f"model: {result.model}")
    print_line(console, f"run directory: {result.run}")
    if as_json:
        print_json(asdict(result))


def _last_measured(folder: Path) -> int:
    """The step after which the model was measured last; 0 where that was before the first."""
    from moored.cli.sft_progress import MEASURED
    from moored.runlog.log import read_records

    records = [r for r in read_records(folder) if any(name in r for name in MEASURED)]
    step = records[-1]["step"] if records else 0
    assert isinstance(step, int)
    return step
