"""How a run goes on after something was lost: back to the newest checkpoint, as `resume` does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moored.config import Config
from moored.engine.base import ClusterEngine, Event
from moored.engine.checkpoint import load_checkpoint, newest_checkpoint
from moored.engine.workers.team import WorkerLost
from moored.training.stopping import LoopState

if TYPE_CHECKING:
    from moored.train import Run

MAX_LOSSES = 3
"""Times in a row that a step is begun again after a lost learner rank."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Logged steps that are done again."""

    num_steps: int
    seconds: float

    def figures(
        self, config: Config, *, extra_s: float = 0.0, extra_steps: int = 0
    ) -> dict[str, float]:
        """For the log, with the step in flight where it is known."""
        steps = self.num_steps + extra_steps
        episodes = steps * config.rollout.num_groups * config.rollout.group_size
        seconds = round(self.seconds + extra_s, 3)
        return {"steps_lost": steps, "episodes_lost": episodes, "seconds_lost": seconds}


def go_back(run: Run) -> Lost:
    """To the newest checkpoint, or to the start where there is none."""
    saved = load_checkpoint(run.log.path, run.engine.learner)
    step = 0 if saved is None else int(saved["step"])
    if saved is not None:
        run.state = LoopState(**saved["loop"])
        run.monitor.load_state_dict(saved["monitor"])
        run.ahead.load(newest_checkpoint(run.log.path), step + 1)
        run.engine.publish()
    run.next_step = step + 1
    return Lost(*run.log.rewind(step))


def begin_again(run: Run, lost: WorkerLost, spent_s: float) -> None:
    """Replace lost workers and go back as `resume` does; what that cost is logged."""
    assert isinstance(run.engine, ClusterEngine)
    start_s = time.monotonic()
    run.ahead.drop()
    run.engine.restart_learner()
    run.state = LoopState()
    run.monitor.load_state_dict(run.fresh_monitor)
    again = go_back(run)
    if run.next_step == 1:
        run.engine.publish()
    seconds = spent_s + time.monotonic() - start_s
    run.note(
        Event(
            kind="learner_back",
            text=f"{lost}; began again with step {run.next_step} after {seconds:.1f} s",
            figures=again.figures(run.config, extra_s=seconds, extra_steps=1),
        )
    )
