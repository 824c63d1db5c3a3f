"""What a training run prints: what will run, a progress bar or one line per step, the time left.

Also the bar of commands that play episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from moored.analysis.findings import number
from moored.cli.console import counted, make_console
from moored.diagnostics.alarm import NOTHING_TO_LOSE
from moored.diagnostics.report import Verdict
from moored.runlog.log import lost_episodes

if TYPE_CHECKING:
    from moored.config import Config
    from moored.diagnostics.look import EnvironmentLook, Measurement
    from moored.train import Run, StepRecord

TIMED_STEPS = 3
"""Steps after which the time left is known; the first of them sets things up."""

BAR_NEEDS = 60
"""Characters of a line from which on there is room for a bar."""


class StepBar:
    """A bar over the steps of a run on a terminal; nothing where the output is none."""

    def __init__(self, console: Console, num_steps: int, done: int) -> None:
        self._console = console
        # The description takes what is left of the line, and is cut off there.
        rest = Column(no_wrap=True, overflow="crop", ratio=1)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *([BarColumn(bar_width=12)] if console.width >= BAR_NEEDS else []),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=rest),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=num_steps, completed=done)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def header_lines(run: Run) -> list[str]:
    """What will run and where its results go."""
    config, rollout = run.config, run.config.rollout
    envs = " + ".join(spec.name for spec in run.mix.specs)
    rates = f"learning rate {config.optimizer.lr:g}"
    if run.algorithm.needs_critic:
        rates += f", critic {config.optimizer.critic_lr:g}"
    num_episodes = rollout.num_groups * rollout.group_size
    return [
        f"model: {config.model}, {run.engine.describe()}",
        f"each step: {rollout.num_groups} prompts of {envs} x {rollout.group_size} = "
        f"{num_episodes} episodes, then {config.algorithm.name} ({rates})",
        steps_line(run.next_step, config.num_steps),
        f"run directory: {run.log.path}",
    ]


def steps_line(first: int, last: int) -> str:
    """Which steps will be done."""
    if first > last:
        return f"{steps_done(last)}; add num_steps={2 * last} to go on to step {2 * last}"
    return steps_left(first, last)


def steps_done(last: int) -> str:
    """The same where none is left."""
    return "steps: the only one is done" if last == 1 else f"steps: all {last} are done"


def steps_left(first: int, last: int) -> str:
    """The same while some are left."""
    if first == 1:
        return f"steps: {last}"
    return f"steps: {last if first == last else f'{first} to {last}'}, going on with the run"


class StepProgress(StepBar):
    """Progress of one run; one plain line per step when the output is not a terminal."""

    def __init__(self, console: Console, config: Config, done: int) -> None:
        super().__init__(console, config.num_steps, done)
        self._config = config
        self._first: list[StepRecord] = []
        self._last_look: Measurement | None = None

    def show(self, record: StepRecord) -> None:
        """Take in a finished step."""
        metrics = record.metrics
        text = (
            f"success {metrics['rollout/success_rate']:.2f}  reward "
            f"{metrics['rollout/reward_mean']:.2f}  valid {metrics['rollout/validity_rate']:.2f}  "
            f"kept {metrics['filter/kept_fraction']:.2f}"
        )
        if num_lost := lost_episodes(metrics):
            text += f"  {counted(num_lost, 'episode')} lost to errors"
        times = " ".join(f"{name} {s:.1f}s" for name, s in record.seconds.items() if s >= 0.05)
        # Not one more: a step may be done again.
        description = f"{text}  [dim]{times}[/]"
        self._bar.update(self._task, completed=record.step, description=description)
        look = record.collapse
        self._last_look = look or self._last_look
        if not self._console.is_terminal and look is None:
            self._console.print(f"step {record.step}: {text}  {times}", markup=False)
        if look is not None:
            self._console.print(f"step {record.step}: {text}  {_look_text(record)}", markup=False)
        self._say_time_left(record)

    @property
    def has_collapsed(self) -> bool:
        """By the last look."""
        return self._last_look is not None and self._last_look.verdict is Verdict.COLLAPSED

    def _say_time_left(self, record: StepRecord) -> None:
        """Once, as soon as it is known."""
        if len(self._first) == TIMED_STEPS:
            return
        self._first.append(record)
        if len(self._first) == TIMED_STEPS and record.step < self._config.num_steps:
            left = duration_text(seconds_left(self._first, self._config))
            last = self._config.num_steps
            self._console.print(f"about {left} left until step {last}", markup=False)


def seconds_left(records: Sequence[StepRecord], config: Config) -> float:
    """Time of the steps after `records`; looks at collapse, gradients and evaluations are rarer."""
    steps = range(records[-1].step + 1, config.num_steps + 1)
    num_due = {
        "collapse": _num_due(steps, config.collapse.every),
        "gradients": _num_due(steps, config.gradients.every),
        "evaluation": _num_due(steps, config.evaluation.every, last=config.num_steps),
    }
    # A rollout beside the update takes no time of its own.
    apart = (*num_due, "rollout_beside")
    usual_s = fmean(
        sum(s for phase, s in record.seconds.items() if phase not in apart)
        for record in records[1:]
    )
    total_s = usual_s * len(steps)
    for phase, count in num_due.items():
        seen_s = [record.seconds[phase] for record in records if phase in record.seconds]
        total_s += seen_s[-1] * count if seen_s else 0.0
    return total_s


def duration_text(seconds: float) -> str:
    """45 s, 12 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _num_due(steps: Iterable[int], every: int, *, last: int | None = None) -> int:
    """How many of later steps than the first do what is done every so often, and at the `last`."""
    return sum(step % every == 0 or step == last for step in steps) if every else 0


def _look_text(record: StepRecord) -> str:
    look = record.collapse
    assert look is not None
    shares = [found.share_unmeasured for found in look.environments.values()]
    if shares and all(share == 1.0 for share in shares):
        return "collapse not measured: no reply holds a valid reasoning"
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
    regime = "" if look.regime is None else f" ({_words(look.regime)})"
    text = (
        f"retrieval {report.retrieval_accuracy:.2f} (chance {1 / report.num_prompts:.2f})  "
        f"MI {number(report.mi_estimate)}  H(Z|X) {report.conditional_entropy_est:.2f}  "
        f"{_words(look.verdict)}{regime}"
    )
    if look.alarm is not None:
        return f"{text}  ALARM: {_words(look.alarm.kind)}"
    return f"{text}  {NOTHING_TO_LOSE}" if look.watched.has_nothing_to_lose else text


def _words(name: str) -> str:
    return name.replace("_", " ")


class EpisodeBar:
    """Counts finished episodes and replies on the terminal.

    Goes to stderr and vanishes at the end; nothing is written when stderr is not a terminal.
    """

    def __init__(self, num_episodes: int) -> None:
        console = make_console(stderr=True)
        self._num_episodes = num_episodes
        self._bar = Progress(
            TextColumn("episodes"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_episodes)

    def __enter__(self) -> EpisodeBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_replies(self, num_replies: int, num_live: int) -> None:
        num_done = self._num_episodes - num_live
        self._bar.update(self._task, completed=num_done, description=f"{num_replies} replies")
