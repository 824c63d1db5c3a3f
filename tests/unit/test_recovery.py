"""How often a run may be thrown back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moored import recovery
from moored.engine.workers.team import WorkerLost


@pytest.fixture
def run(monkeypatch) -> Any:
    """A run on a cluster with a checkpoint after step 5."""

    def go_back(run, lost, start_s):
        run.next_step = 6

    monkeypatch.setattr(recovery, "begin_again", go_back)
    engine = SimpleNamespace(on_event=None, restart_learner=print, make_pool=print)
    return SimpleNamespace(engine=engine, next_step=6, furthest_step=6, num_losses=0)


def play(run: Any, dies_at: list[int]) -> list[int]:
    """Steps to the end, or until it is given up; each of `dies_at` is a loss in that step."""
    done = []

    def step():
        if run.next_step in dies_at:
            dies_at.remove(run.next_step)
            raise WorkerLost("a learner rank died")
        done.append(run.next_step)
        run.next_step += 1

    while run.next_step <= 10:
        recovery.surviving(run, step)
    return done


def test_a_rank_that_always_dies_in_the_same_step_ends_the_run(run):
    always = [7] * 100
    with pytest.raises(WorkerLost):
        play(run, always)
    assert len(always) == 100 - recovery.MAX_LOSSES - 1


def test_a_run_that_gets_further_between_losses_goes_on(run):
    losses = [7] * recovery.MAX_LOSSES + [8] * recovery.MAX_LOSSES
    assert play(run, losses)[-1] == 10
    assert losses == []


def test_a_loss_of_one_process_without_a_cluster_is_raised(run):
    run.engine = object()
    with pytest.raises(WorkerLost):
        play(run, [6])
