"""How a run goes on after something was lost: back to the newest checkpoint, as `resume` does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from moored.config import Config
from moored.engine.base import ClusterEngine, Event
from moored.engine.checkpoint import load_checkpoint, newest_checkpoint
from moored.engine.workers.team import WorkerLost
from moored.training.stopping import LoopState

if TYPE_CHECKING:
    from moored.train import Run

MAX_LOSSES = 5
"""Times that a run is thrown back by lost learner ranks before it gets further than it was."""

T = TypeVar("T")


def surviving(run: Run, call: Callable[[], T]) -> T:
    """What `call` returns; after a lost worker the run goes back, and it is called again."""
    lost, start_s = None, time.monotonic()
    while True:
        try:
            if lost is not None:
                begin_again(run, lost, start_s)
                start_s = time.monotonic()
            result = call()
        except WorkerLost as error:
            lost = error
            run.num_losses += 1
            if run.num_losses > MAX_LOSSES or not isinstance(run.engine, ClusterEngine):
                raise
            continue
        if run.next_step > run.furthest_step:
            run.furthest_step, run.num_losses = run.next_step, 0
        return result


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


def begin_again(run: Run, lost: WorkerLost, start_s: float) -> None:
    """Replace lost workers and go back as `resume` does; log what that cost since `start_s`."""
    assert isinstance(run.engine, ClusterEngine)
    run.ahead.drop()
    run.engine.restart_learner()
    run.state = LoopState()
    run.monitor.load_state_dict(run.fresh_monitor)
    again = go_back(run)
    if run.next_step == 1:
        run.engine.publish()
    seconds = time.monotonic() - start_s
    run.note(
        Event(
            kind="learner_back",
            text=f"{lost}; began again with step {run.next_step} after {seconds:.1f} s",
            figures=again.figures(run.config, extra_s=seconds, extra_steps=1),
        )
    )
