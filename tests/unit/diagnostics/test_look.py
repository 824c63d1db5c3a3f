"""Looks at runs with several environments: each is measured and judged by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moored.diagnostics import Regime
from moored.diagnostics.monitor import CollapseMonitor
from moored.errors import MooredError
from moored.types import Group, Prompt, ScoreRequest, StopReason, Trajectory, Turn

THINK, END, NEVER = 1, 2, -50.0
FILLERS = (30, 31, 32, 33)
STARTS = {"sokoban": 100, "bandit": 200}
"""First prompt of each environment; task t has this number + t."""


@dataclass
class ToyModel:
    """A reasoning is a word and one of four fillers at random.

    A template is one word for its whole environment; a reader writes the word of its prompt.
    """

    readers: tuple[str, ...] = ()

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [
            [
                np.array([self._logp(int(r.prompt.ids[0]), int(t)) for t in ids])
                for ids in r.continuations
            ]
            for r in requests
        ]

    def _logp(self, prompt: int, token: int) -> float:
        if token < 100:
            return -math.log(4)
        return 0.0 if token == self.word(prompt) else NEVER

    def word(self, prompt: int) -> int:
        env = "sokoban" if prompt < 200 else "bandit"
        return prompt if env in self.readers else STARTS[env]


def make_groups(model: ToyModel, env: str, tasks: Sequence[int], *, silent: int = 0) -> list[Group]:
    """Two replies to each task; the first `silent` tasks have one without tags."""
    groups = []
    for place, task in enumerate(tasks):
        prompt = STARTS[env] + task
        turns = []
        for member in range(2):
            is_silent = place < silent and member == 0
            reply = [END] if is_silent else [THINK, model.word(prompt), FILLERS[member], END]
            turns.append(
                Turn(
                    prompt=Prompt(np.array([prompt])),
                    completion_ids=np.array(reply),
                    logprobs=np.zeros(len(reply)),
                    think_span=None if is_silent else (1, 3),
                    reply="",
                    observation_start=0,
                )
            )
        trajectories = tuple(
            Trajectory(env=env, task_seed=task, episode_seed=i, turns=(t,), stop=StopReason.DONE)
            for i, t in enumerate(turns)
        )
        groups.append(Group(group_id=task, env=env, task_seed=task, trajectories=trajectories))
    return groups


def both(model: ToyModel, num_tasks: int = 4) -> list[Group]:
    tasks = range(num_tasks)
    return make_groups(model, "sokoban", tasks) + make_groups(model, "bandit", tasks)


def monitor(model: ToyModel, **options) -> CollapseMonitor:
    return CollapseMonitor(score=model, num_prompts={"sokoban": 4, "bandit": 4}, **options)


def test_one_template_for_each_of_two_environments_is_not_healthy():
    found = monitor(model := ToyModel()).measure(1, both(model))
    pooled = "collapse_first_turn_sample/mi_seq_estimate"
    assert found.metrics[pooled] == pytest.approx(math.log(2))  # 0.693: a text names its game
    for env in STARTS:
        name = f"collapse_first_turn_sample/{env}/mi_seq_estimate"
        assert found.metrics[name] == pytest.approx(0.0, abs=1e-12)
        assert found.environments[env].regime is Regime.TEMPLATE_COLLAPSE
    assert found.regime is Regime.TEMPLATE_COLLAPSE


def test_every_environment_has_its_own_regime_and_the_run_has_the_worst():
    model = ToyModel(readers=("bandit",))
    found = monitor(model).measure(1, both(model))
    assert found.environments["bandit"].regime is Regime.DIVERSE
    assert found.environments["sokoban"].regime is Regime.TEMPLATE_COLLAPSE
    assert found.regime is Regime.TEMPLATE_COLLAPSE
    bandit = found.reports["bandit/first_turn"]
    assert (bandit.num_prompts, bandit.mi_seq_estimate) == (4, pytest.approx(math.log(4)))
    assert found.environments["bandit"].view == "bandit/first_turn"
    # first_turn alone is the pooled figure, of all eight prompts.
    assert found.reports["first_turn"].num_prompts == 8


def test_environments_share_the_rows_of_the_trajectory_view_whose_cost_is_their_square():
    found = monitor(model := ToyModel(), num_pairs=8).measure(1, both(model))
    rows = {name: found.reports[name].num_reasonings for name in found.reports}
    assert rows["trajectory"] == 8
    assert rows["sokoban/trajectory"] == rows["bandit/trajectory"] == 4
    assert rows["sokoban/first_turn"] == rows["bandit/first_turn"] == 8


def test_one_environment_needs_no_name():
    model = ToyModel(readers=("sokoban",))
    groups = make_groups(model, "sokoban", range(4))
    found = CollapseMonitor(score=model, num_prompts=4).measure(1, groups)
    assert list(found.environments) == ["sokoban"]
    assert found.environments["sokoban"].view == "first_turn"
    assert list(found.reports) == ["first_turn", "trajectory"]
    assert not any("sokoban" in name for name in found.metrics)


def test_an_environment_that_a_step_did_not_draw_is_named_and_keeps_the_names_of_the_other():
    watch = monitor(model := ToyModel(readers=("sokoban", "bandit")))
    alone = watch.measure(1, make_groups(model, "sokoban", range(4)))
    assert "got 0 from 0 groups" in alone.skipped["bandit/first_turn"]
    assert alone.environments["bandit"].regime is None
    assert alone.environments["bandit"].share_unmeasured is None
    assert alone.environments["sokoban"].regime is Regime.DIVERSE
    assert "collapse_first_turn_sample/sokoban/mi_estimate" in alone.metrics


def test_an_alarm_names_its_environment():
    watch = monitor(ToyModel(), views=("first_turn",))
    alarms = {}
    for step in range(1, 25):
        readers = ("sokoban", "bandit") if step < 12 else ("bandit",)
        watch.score = model = ToyModel(readers=readers)
        found = watch.measure(step, both(model))
        alarms |= {env: step for env, look in found.environments.items() if look.alarm}
        assert (found.alarm is not None) == any(look.alarm for look in found.environments.values())
    assert list(alarms) == ["sokoban"]
    assert watch.alarm is not None and watch.alarm.step == alarms["sokoban"]


def test_a_resumed_run_goes_on_with_every_environment():
    model = ToyModel(readers=("bandit",))
    begun, resumed = monitor(model), monitor(model)
    begun.measure(1, both(model))
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    later = make_groups(model, "sokoban", range(4))
    assert begun.measure(2, later) == resumed.measure(2, later)
    assert begun.state_dict() == resumed.state_dict()


def test_replies_that_never_enter_mi_are_counted_for_each_environment():
    model = ToyModel()
    groups = make_groups(model, "sokoban", range(4), silent=2) + make_groups(
        model, "bandit", range(4)
    )
    found = monitor(model).measure(1, groups)
    assert found.metrics["collapse/share_unmeasured"] == 2 / 16
    assert found.metrics["collapse/sokoban/share_unmeasured"] == 2 / 8
    assert found.metrics["collapse/bandit/share_unmeasured"] == 0
    assert found.environments["sokoban"].share_unmeasured == 2 / 8


def test_one_prompt_of_n_without_a_reasoning_no_longer_removes_the_look():
    model = ToyModel(readers=("sokoban",))
    groups = make_groups(model, "sokoban", range(4))
    mute = replace(
        groups[0],
        trajectories=tuple(
            replace(t, turns=(replace(t.turns[0], think_span=None),))
            for t in groups[0].trajectories
        ),
    )
    found = CollapseMonitor(score=model, num_prompts=4).measure(1, [mute, *groups[1:]])
    report = found.reports["first_turn"]
    assert (report.num_prompts, report.num_reasonings) == (4, 6)
    assert report.mi_seq_estimate == pytest.approx(math.log(4))
    assert found.metrics["collapse/share_unmeasured"] == 1 / 4


def test_a_number_of_prompts_is_needed_for_every_environment():
    model = ToyModel()
    watch = CollapseMonitor(score=model, num_prompts={"sokoban": 4})
    with pytest.raises(MooredError, match="no entry for the environment 'bandit'"):
        watch.measure(1, both(model))


def test_a_look_is_written_as_json():
    found = monitor(model := ToyModel()).measure(1, both(model))
    line = json.loads(json.dumps(found.to_dict()))
    assert line["regime"] == "template_collapse"
    look = line["environments"]["sokoban"]
    assert look["regime"] == "template_collapse" and look["alarm"] is None
    assert line["reports"][look["view"]]["num_prompts"] == 4
