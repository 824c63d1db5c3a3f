"""A comparison of runs in words and cells: what terminal and report have in common."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from moored.analysis.compare import Arm, Comparison, Figure, Record
from moored.runlog.log import lost_episodes


def figure_cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    start = "" if figure.start is None else f"{_number(figure.start)} → "
    spread = "" if figure.half_width is None else f" ± {figure.half_width:.3f}"
    return f"{start}{_number(figure.end)}{spread}"


def _number(value: float) -> str:
    """Three decimals, without a minus sign before zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def verdicts_of(arm: Arm) -> str:
    """The verdict of one run, or how many runs have which."""
    words = [run.verdict or "–" for run in arm.runs]
    if len(set(words)) == 1:
        return words[0]
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def alarms_of(arm: Arm) -> str:
    steps = ["–" if run.alarm_step is None else str(run.alarm_step) for run in arm.runs]
    return ", ".join(steps) if set(steps) != {"–"} else "–"


def explanation(found: Comparison) -> list[str]:
    """What is averaged, and what the intervals are over."""
    averaged = sorted({run.num_averaged for arm in found.arms for run in arm.runs})
    num = str(averaged[0]) if len(averaged) == 1 else f"{averaged[0]} to {averaged[-1]}"
    steps = "step" if averaged == [1] else f"{num} steps"
    lines = [f"Means over the first and the last {steps} of each run, and the looks in them."]
    over = {arm.interval_over for arm in found.arms if _has_interval(arm)}
    if "seeds" in over:
        lines.append("± is half of the 95 % interval over seeds.")
    if "steps" in over:
        which = " of the other runs" if "seeds" in over else ""
        lines.append(
            f"± is half of the 95 % interval over steps{which}. Steps of one run are not "
            f"independent, so it is too narrow; repeat with other seeds for one that is not."
        )
    ends = found.last_steps
    if len(ends) > 1:
        lines.append(
            f"The runs end at different steps, from {min(ends)} to {max(ends)}; --until "
            f"{min(ends)} compares all of them there."
        )
    lost = {arm.label: sum(run.num_lost for run in arm.runs) for arm in found.arms}
    if any(lost.values()):
        each = ", ".join(f"{label} {num}" for label, num in lost.items())
        lines.append(
            f"Episodes that ended in an error, and count in neither success nor reward: {each}."
        )
    return lines


def lost_sentence(steps: Sequence[Record]) -> str | None:
    """How many episodes of a run ended in an error, and how often; None where none did."""
    lost = [num for num in map(lost_episodes, steps) if num]
    if not lost:
        return None
    episodes = "1 episode" if sum(lost) == 1 else f"{sum(lost):,} episodes"
    return (
        f"{episodes} ended in an error, in {len(lost)} of {len(steps)} steps, and no success or "
        f"reward is of such an episode."
    )


def option_cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_interval(arm: Arm) -> bool:
    return any(figure.half_width is not None for figure in arm.figures().values())
