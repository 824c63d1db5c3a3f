"""Learning rates over a run: a pure function of the step, so there is nothing to save or resume."""

from __future__ import annotations

import math

from moored.errors import MooredError
from moored.names import SCHEDULES, check_name


def lr_factor(
    step: int,
    num_steps: int,
    *,
    schedule: str = "constant",
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Factor on the learning rate of training step `step`, counted from 1.

    Rises as step / warmup_steps to 1, then stays there (`constant`) or falls along a line or half
    a cosine towards `min_ratio`, reached one step after the last: with `min_ratio` 0 the last
    step still learns.
    """
    check_name("schedule", schedule, SCHEDULES)
    if step < 1:
        raise MooredError(f"steps are counted from 1, got {step}")
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min((step - 1 - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return min_ratio + (1.0 - min_ratio) * left
