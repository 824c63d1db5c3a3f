"""What a warm start prints: what will run, a progress bar or one line per step, what changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moored.cli.progress import StepBar, steps_done, steps_left
from moored.runlog.log import read_records

if TYPE_CHECKING:
    from moored.sft.loop import SftRecord, SftRun

MEASURED = {
    "evaluation/loss": "held-out loss",
    "evaluation/validity_rate": "validity",
    "evaluation/success_rate": "success",
    "evaluation/reward_mean": "reward",
}
"""Metrics that are compared, and how they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSummary:
    """What `--json` prints."""

    run: str
    model: str | None
    """Where it is, in Hugging Face format; None when the run was stopped at once."""
    steps: int
    reason: str
    before: dict[str, object] | None
    """Measured before the first step; None when nothing was asked for."""
    after: dict[str, object] | None
    """The newest measurement since."""


def summarize(run: Path, steps: int, reason: str) -> SftSummary:
    """How the run in this folder stands now, after so many steps, from its log."""
    records = [r for r in read_records(run) if any(name in r for name in MEASURED)]
    before = [record for record in records if record["step"] == 0]
    after = [record for record in records if record["step"] != 0]
    model = run / "model"
    return SftSummary(
        run=str(run),
        model=str(model) if model.is_dir() else None,
        steps=steps,
        reason=reason,
        before=_measured(before[0]) if before else None,
        after=_measured(after[-1]) if after else None,
    )


def _measured(record: Mapping[str, object]) -> dict[str, object]:
    return {name.removeprefix("evaluation/"): record[name] for name in MEASURED if name in record}


def comparison_lines(result: SftSummary) -> list[str]:
    """`success: 0.02 before, 0.84 after`, a line for each figure that was measured."""
    lines = []
    for name, words in MEASURED.items():
        key = name.removeprefix("evaluation/")
        found = [
            f"{figures[key]:.3f} {when}"
            for figures, when in ((result.before, "before"), (result.after, "after"))
            if figures is not None and figures.get(key) is not None
        ]
        if found:
            lines.append(f"{words}: {', '.join(found)}")
    return lines


def header_lines(run: SftRun) -> list[str]:
    """What will run and where its results go."""
    config = run.config
    envs = " + ".join(spec.name for spec in config.env)
    lessons = f"dialogues of {config.dialogues}" if config.dialogues else f"episodes of {envs}"
    rate = f"learning rate {config.optimizer.lr:g}"
    first, last = run.next_step, config.num_steps
    num_tasks = config.evaluation.num_tasks if envs else 0
    tried = f", tried on {num_tasks} tasks before and after" if num_tasks else ""
    return [
        f"model: {config.model}, {run.engine.describe()}",
        f"each step: up to {config.batch_tokens:,} tokens of {lessons} ({rate})",
        steps_left(first, last) + tried if first <= last else steps_done(last),
        f"run directory: {run.log.path}",
    ]


class SftProgress(StepBar):
    """Progress of one run; one plain line per step when the output is not a terminal."""

    def on_replies(self, num_replies: int, num_live: int) -> None:
        """The model is being tried on tasks."""
        text = f"trying it: {num_replies} replies, {num_live} episodes to go"
        self._bar.update(self._task, description=text)

    def show(self, record: SftRecord) -> None:
        """Take in a finished step, or the measurement before the first."""
        metrics = record.metrics
        parts = []
        if record.step:
            parts.append(f"loss {metrics['train/loss']:.3f}")
            parts.append(f"{metrics['train/num_tokens']:,.0f} tokens")
        parts += [f"{MEASURED[n]} {x:.3f}" for n, x in metrics.items() if n in MEASURED]
        text = "  ".join([*parts, f"{record.seconds:.1f}s"])
        self._bar.update(self._task, advance=bool(record.step), description=text)
        is_measured = any(name in metrics for name in MEASURED)
        if is_measured or not self._console.is_terminal:
            self._console.print(f"step {record.step}: {text}", markup=False)
