"""What a training run prints: a progress bar, and one line per look at collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from moored.diagnostics.look import EnvironmentLook
    from moored.train import StepRecord


class StepProgress:
    """Progress of one run; one plain line per step when the output is not a terminal."""

    def __init__(self, console: Console, num_steps: int, done: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=num_steps, completed=done)

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, record: StepRecord) -> None:
        """Take in a finished step."""
        metrics = record.metrics
        text = (
            f"success {metrics['rollout/success_rate']:.2f}  reward "
            f"{metrics['rollout/reward_mean']:.2f}  valid {metrics['rollout/validity_rate']:.2f}  "
            f"kept {metrics['filter/kept_fraction']:.2f}"
        )
        times = " ".join(f"{name} {s:.1f}s" for name, s in record.seconds.items() if s >= 0.05)
        self._bar.update(self._task, advance=1, description=f"{text}  [dim]{times}[/]")
        look = record.collapse
        if not self._console.is_terminal and look is None:
            self._console.print(f"step {record.step}: {text}  {times}", markup=False)
        if look is not None:
            self._console.print(f"step {record.step}: {text}  {_look_text(record)}", markup=False)


def _look_text(record: StepRecord) -> str:
    look = record.collapse
    assert look is not None
    several = len(look.environments) > 1
    parts = [
        f"{env}: {_environment_text(found)}" if several else _environment_text(found)
        for env, found in look.environments.items()
        if found.watched is not None
    ]
    parts += [f"{view} not measured: {why}" for view, why in look.skipped.items()]
    return "  ".join(parts)


def _environment_text(look: EnvironmentLook) -> str:
    """What the followed view of one environment says."""
    assert look.watched is not None
    report = look.watched.report
    text = (
        f"retrieval {report.retrieval_accuracy:.2f} (chance {1 / report.num_prompts:.2f})  "
        f"MI {report.mi_estimate:.3f}  H(Z|X) {report.conditional_entropy_est:.2f}  {look.regime}"
    )
    return text if look.alarm is None else f"{text}  ALARM: {look.alarm.kind}"
