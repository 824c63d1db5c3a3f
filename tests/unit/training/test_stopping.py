"""Early stops, counted by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from moored.config import Config, load_config
from moored.diagnostics.alarm import Alarm
from moored.diagnostics.report import Regime
from moored.training.stopping import LoopState, outcome_free_warning, stop_reason, take_step


def stops_at(
    config: Config, steps: Sequence[tuple[float, bool, float | None]], validity: float = 1.0
) -> tuple[int, str]:
    """First step that ends the run, from 1, and why; (0, "") when none does."""
    state = LoopState()
    for number, (variance, is_empty, success) in enumerate(steps, start=1):
        state = LoopState(**asdict(state))  # what a resumed run starts from
        metrics = {"update/is_empty": float(is_empty), "rollout/reward_variance_mean": variance}
        metrics["rollout/validity_rate"] = validity
        if success is not None:
            metrics["evaluation/success_rate"] = success
        take_step(config, state, metrics)
        reason = stop_reason(config, state)
        if reason:
            return number, reason
    return 0, ""


def test_variance_below_a_tenth_of_its_first_ten_steps_stops_after_ten_in_a_row():
    config = load_config({})
    start = [(2.0, False, None)] * 5 + [(0.0, False, None)] * 5  # mean 1, so the floor is 0.1
    low, above = (0.0999, False, None), (0.1, False, None)
    assert stops_at(config, start + [low] * 30)[0] == 20
    assert stops_at(config, start + [low] * 9 + [above] + [low] * 9) == (0, "")
    assert "below 10% of its start for 10 steps" in stops_at(config, start + [low] * 10)[1]


def test_a_step_without_two_rewards_to_compare_is_none_of_low_variance():
    config, state = load_config({"filter": {"max_empty_steps": 9}}), LoopState()

    def take(variance: float) -> str:
        is_lost = math.isnan(variance)
        metrics = {"update/is_empty": float(is_lost), "rollout/reward_variance_mean": variance}
        metrics["rollout/validity_rate"] = 1.0
        metrics["rollout/success_rate"] = 0.5
        take_step(config, state, metrics)
        return stop_reason(config, state)

    # An outage among the first ten steps would lower the bar, and later count as a low step.
    start = [take(math.nan) for _ in range(5)] + [take(1.0) for _ in range(10)]
    low = [take(0.09) for _ in range(9)] + [take(math.nan) for _ in range(5)]
    assert {*start, *low} == {""}
    assert "for 10 steps" in take(0.09)


def test_an_evaluation_of_lost_episodes_neither_counts_as_low_nor_forgives_low_ones():
    config = load_config({"stop": {"min_success": [0.01, 2]}})
    low, lost = (1.0, False, 0.0), (1.0, False, math.nan)
    assert stops_at(config, [low, lost, lost])[0] == 0
    assert stops_at(config, [low, lost, low])[0] == 3


def test_low_variance_is_ignored_when_turned_off():
    config = load_config({"stop": {"low_variance": 0.0}})
    steps = [(1.0, False, None)] * 10 + [(0.0, False, None)] * 40
    assert stops_at(config, steps) == (0, "")


def test_five_evaluations_below_one_percent_stop_however_many_steps_lie_between():
    config = load_config({"stop": {"low_variance": 0.0}})
    low, between, better = (1.0, False, 0.009), (1.0, False, None), (1.0, False, 0.01)
    assert stops_at(config, [low, between] * 9)[0] == 9
    assert stops_at(config, [low] * 4 + [better] + [low] * 4) == (0, "")


def test_empty_steps_count_only_in_a_row():
    config = load_config({"filter": {"max_empty_steps": 3}})
    empty, full = (1.0, True, None), (1.0, False, None)
    assert stops_at(config, [empty, empty, full, empty, empty]) == (0, "")
    assert stops_at(config, [full, empty, empty, empty])[0] == 4


def test_a_run_without_signal_is_told_to_learn_the_form_first_only_where_replies_are_malformed():
    config = load_config({"filter": {"max_empty_steps": 1}})
    reason = stops_at(config, [(0.0, True, None)], validity=0.04)[1]
    assert "4% of the turns" in reason and "moored sft" in reason
    reason = stops_at(config, [(0.0, True, None)], validity=0.9)[1]
    assert "easier tasks" in reason and "moored sft" not in reason


def test_an_alarm_stops_a_run_only_where_that_is_asked_for_and_stops_it_again_when_resumed():
    metrics = {"update/is_empty": 0.0, "rollout/reward_variance_mean": 1.0}
    metrics["rollout/validity_rate"] = 1.0
    alarm = Alarm(
        step=7,
        kind=Regime.TEMPLATE_COLLAPSE,
        mi_level=0.1,
        mi_level_se=0.01,
        mi_reference=1.0,
    )
    asks, goes_on, state = load_config({"stop": {"alarm": True}}), load_config({}), LoopState()
    take_step(asks, state, metrics)
    assert stop_reason(asks, state) == ""
    take_step(asks, state, metrics, alarm)
    resumed = LoopState(**asdict(state))
    assert "alarm went off at step 7" in stop_reason(asks, resumed)
    assert stop_reason(goes_on, resumed) == ""


def warned_after(shares: Sequence[float], *overrides: str) -> tuple[int, str]:
    """First step after which something is said of the push, from 1; (0, "") when nothing is."""
    config, state = load_config({}, ["algorithm.name=grpo", "filter.rule=none", *overrides]), None
    for number, share in enumerate(shares, start=1):
        state = LoopState() if state is None else LoopState(**asdict(state))
        metrics = {"update/is_empty": 0.0, "rollout/reward_variance_mean": 1.0}
        metrics |= {"rollout/validity_rate": 1.0, "signal/outcome_free_share": share}
        take_step(config, state, metrics)
        if text := outcome_free_warning(config, state):
            return number, text
    return 0, ""


def test_mostly_outcome_free_updates_are_told_after_the_first_ten_of_them():
    step, text = warned_after([0.9, 0.4] * 10)
    assert step == 10
    assert text.startswith("65%") and "first 10 updates" in text
    assert warned_after([0.9, 0.05] * 10) == (0, "")  # mean 0.475
    # Steps that trained on nothing do not count.
    assert warned_after([math.nan, 0.7] * 12)[0] == 20


def test_outcome_free_updates_are_told_only_where_a_remedy_is_left():
    shares = [0.9] * 12
    for override in (
        "filter.rule=top_p",
        "algorithm.advantage=dr_grpo",
        "algorithm.name=ppo",
        "algorithm.name=rloo",
    ):
        assert warned_after(shares, override) == (0, ""), override
    assert warned_after(shares, "algorithm.name=gspo")[0] == 10
    assert warned_after(shares, "algorithm.name=ppo", "algorithm.advantage=grpo")[0] == 10
    # Without any success the share is 1, divided or not.
    assert warned_after([1.0] * 12) == (0, "")


def test_empty_steps_of_errors_alone_are_not_put_down_to_tasks_or_form():
    config, state = load_config({"filter": {"max_empty_steps": 1}}), LoopState()
    metrics = {"update/is_empty": 1.0, "rollout/reward_variance_mean": 0.0}
    # No episode came to a reply: no turn is valid, and there is no success to speak of.
    errors = {"rollout/validity_rate": 0.0, "rollout/success_rate": math.nan}
    take_step(config, state, {**metrics, **errors})
    reason = stop_reason(config, LoopState(**asdict(state)))
    assert "every episode of the last one ended in an error" in reason
    assert "well-formed" not in reason and "easier tasks" not in reason
    take_step(config, state, {**metrics, "rollout/validity_rate": 1.0, "rollout/success_rate": 0.0})
    assert "easier tasks" in stop_reason(config, state)
