"""`moored train`, `compare`, `models`: thin commands over `build` and `train`."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moored.cli.eval import eval_command
from moored.errors import ConfigError, MooredError

if TYPE_CHECKING:
    from moored.train import Run, StepRecord

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("train")(train_command)
    app.command("eval")(eval_command)
    app.command("compare")(compare_command)
    app.command("models")(models_command)


def train_command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRESET|FILE|KEY=VALUE]…",
            help="Presets or YAML files, laid over each other, and options: filter.value=0.8.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/PRESET, numbered.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")
    ] = None,
) -> None:
    """Train an agent; Ctrl-C stops after the step, saves, and says how to go on."""
    from moored.config import load_config
    from moored.engine.build import build
    from moored.presets import read_presets
    from moored.train import resume as resume_run
    from moored.train import start

    words = what or []
    presets = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if resume is not None:
        if presets:
            raise ConfigError(f"--resume takes options only, got {presets[0]!r}; leave it out")
        made = build(load_config(resume / "config.yaml", overrides), resume, resume=True)
        resume_run(made)
    else:
        config = load_config(read_presets(presets), overrides)
        made = build(config, run or _free_folder(presets))
        start(made)
    _run_loop(made)


def _free_folder(presets: Sequence[str]) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist."""
    name = "-".join(Path(preset).stem for preset in presets) or "run"
    number = 1
    while (path := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def _run_loop(run: Run) -> None:
    from rich.console import Console

    from moored.cli.profiling import profiled
    from moored.cli.progress import StepProgress
    from moored.train import train

    console = Console()
    stopping = False
    tables = []

    def on_interrupt(*_: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        console.print("stopping after this step; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(
                StepProgress(console, run.config.num_steps, run.next_step - 1)
            )
            watchers = [progress.show]
            if run.config.profile:
                profile = stack.enter_context(profiled(run.log.path / "trace.json"))
                watchers.append(profile.see)
                stack.callback(lambda: tables.append(profile.table()))

            def on_step(record: StepRecord) -> bool:
                for see in watchers:
                    see(record)
                return stopping

            reason = f"{train(run, on_step)}\nmodel: {run.log.path / 'model'}"
    except KeyboardInterrupt:
        reason = "stopped at once; the step in flight is lost"
        stopping = True
    finally:
        signal.signal(signal.SIGINT, before)
        run.close()
    for table in tables:
        console.print(table)
    console.print(f"{reason}\nrun directory: {run.log.path}")
    if stopping:
        console.print(f"go on with: moored train --resume {run.log.path}")


def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")], as_json: AsJson = False
) -> None:
    """Put the ends of several runs side by side."""
    rows = {str(path): _summary(path) for path in runs}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    names = [path.name for path in runs]
    headers = names if len(set(names)) == len(names) else list(rows)
    table = Table("", *headers, box=box.SIMPLE_HEAD, header_style="bold")
    for figure in next(iter(rows.values())):
        table.add_row(figure, *(_cell(row[figure]) for row in rows.values()))
    Console().print(table)


def _summary(path: Path, window: int = 5) -> dict[str, object]:
    """Means over the last `window` steps and measurements; regime and alarm as they stand."""
    from moored.runlog.log import read_records

    steps, looks = read_records(path), read_records(path, "collapse")
    if not steps:
        raise MooredError(f"{str(path)!r} has no finished step yet; nothing to compare")

    def mean(records: Sequence[Mapping[str, object]], key: str) -> float | None:
        values = [r[key] for r in records[-window:] if isinstance(r.get(key), float | int)]
        return sum(map(float, values)) / len(values) if values else None  # pyright: ignore[reportArgumentType]

    view = "collapse_first_turn_sample"
    alarms = [look["step"] for look in looks if look.get("alarm")]
    return {
        "steps": steps[-1]["step"],
        "success": mean(steps, "rollout/success_rate"),
        "validity": mean(steps, "rollout/validity_rate"),
        "retrieval": mean(looks, f"{view}/retrieval_accuracy"),
        "chance": mean(looks, f"{view}/retrieval_chance_level"),
        "MI": mean(looks, f"{view}/mi_estimate"),
        "H(Z|X)": mean(looks, f"{view}/conditional_entropy_est"),
        "regime": looks[-1]["regime"] if looks else None,
        "alarm step": alarms[0] if alarms else None,
    }


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def models_command(as_json: AsJson = False) -> None:
    """List the models that can be used by name."""
    from moored.models.load import describe_models

    rows = describe_models()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']:<12} {row['what']}")
