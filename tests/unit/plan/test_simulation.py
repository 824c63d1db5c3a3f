"""Whole simulations, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from moored.plan.calls import Calls
from moored.plan.events import Spread
from moored.plan.simulation import Outcome, Scenario, simulate


def run(**changes: Any) -> Outcome:
    """4 episodes of 2 turns of 10 tokens on one replica, where nothing else takes time."""
    given: dict[str, Any] = {
        "workers": 4,
        "replicas": 1,
        "episodes": 4,
        "turns": 2,
        "num_steps": 1,
        "reply_tokens": Spread(median=10.0),
        "env_s": Spread(median=0.0),
        "driver_turn_s": 0.0,
        "step_s": 0.1,
        "row_s": 0.01,
    }
    return simulate(Scenario(**{**given, **changes}))


def test_replies_written_together_take_a_step_for_each_token():
    found = run()
    # 2 turns x 10 tokens x (0.1 + 4 x 0.01) s.
    assert found.seconds == pytest.approx(2.8)
    assert found.turns_per_s == pytest.approx(8 / 2.8)
    assert found.tokens_per_s == pytest.approx(80 / 2.8)
    assert found.bound == "sampler"


def test_environments_and_network_add_their_seconds_to_every_turn():
    found = run(env_s=Spread(median=1.0), network_s=0.1)
    # A reset and 2 steps of 1 s, each there and back; 2 replies, each there and back.
    assert found.seconds == pytest.approx(2.8 + 3 * (1.0 + 0.2) + 2 * 0.2)
    assert found.turn_s["environment"] == pytest.approx(3.0 / 2)


def test_a_bound_on_calls_lets_environments_answer_one_after_the_other():
    # 3 calls of 1 s of each of 4 episodes, two at a time: nothing else takes time.
    found = run(env_s=Spread(median=1.0), env_calls=2, step_s=1e-9, row_s=0.0)
    assert found.seconds == pytest.approx(3 * 4 / 2)
    assert found.bound == "environment"


def test_fewer_workers_than_episodes_play_one_after_the_other():
    # 2 at a time: two rounds of 2 turns x 10 tokens x 0.12 s.
    assert run(workers=2).seconds == pytest.approx(2 * 2.4)


def test_replicas_share_the_episodes():
    # 2 rows on each of two replicas.
    assert run(replicas=2).seconds == pytest.approx(2.4)


def test_a_driver_that_is_too_slow_bounds_the_rollout():
    found = run(workers=1000, episodes=1000, driver_turn_s=0.01, step_s=1e-6, row_s=0.0)
    # Half a turn for the reset, then 2 turns: 2.5 x 10 ms for each of 1,000 episodes.
    assert found.seconds == pytest.approx(25.0, rel=1e-3)
    assert found.driver_share > 0.99
    assert found.bound == "driver"
    twice = run(workers=1000, episodes=1000, driver_turn_s=0.01, step_s=1e-6, row_s=0.0, drivers=2)
    assert twice.seconds == pytest.approx(12.5, rel=1e-2)


@pytest.mark.parametrize(
    ("update_s", "max_lag", "seconds"),
    [
        # Rollouts take 2.8 s. In turn: 4 x (2.8 + 2 + 0.5).
        (2.0, 0, 4 * 5.3),
        # Overlapped: a rollout, 4 rollouts bound by themselves, the last update.
        (2.0, 1, 4 * 2.8 + 2.5),
        # The update bounds: a rollout, then 4 updates.
        (4.0, 1, 2.8 + 4 * 4.5),
        # More lag gains nothing where each takes always as long.
        (4.0, 2, 2.8 + 4 * 4.5),
    ],
)
def test_lag_overlaps_rollouts_with_updates(update_s, max_lag, seconds):
    found = run(num_steps=4, update_s=update_s, publish_s=0.5, max_lag=max_lag)
    assert found.seconds == pytest.approx(seconds)
    assert found.mean_lag <= max_lag


def test_rollouts_in_turn_have_the_newest_weights():
    assert run(num_steps=4, update_s=2.0).mean_lag == 0.0
    # Of 4 steps all but the first are one update behind.
    assert run(num_steps=4, update_s=2.0, max_lag=1).mean_lag == pytest.approx(0.75)


def test_in_lockstep_every_turn_waits_for_the_slowest_environment():
    noisy = {"env_s": Spread(median=0.5, sigma=1.0), "workers": 50, "episodes": 50, "step_s": 0.01}
    noisy |= {"row_s": 0.0, "turns": 5}
    streamed, lockstep = run(**noisy), run(**noisy, mode="lockstep")
    assert lockstep.seconds > 1.5 * streamed.seconds
    assert lockstep.bound == "stragglers"
    assert lockstep.turn_s["other episodes"] > 0.0 == streamed.turn_s["other episodes"]


def test_without_differences_lockstep_takes_as_long_as_streams():
    assert run(mode="lockstep").seconds == pytest.approx(run().seconds)


def test_the_least_busy_replica_is_better_than_a_random_one():
    many = {"workers": 256, "episodes": 256, "replicas": 16, "turns": 4}
    assert run(**many).seconds < run(**many, dispatch="random").seconds


def test_slow_replicas_hold_up_the_end():
    one = run(replicas=20, slow_share=0.05, slow_factor=3.0, workers=40, episodes=40)
    # 2 rows on each of 20; the slow one takes three times 2.4 s.
    assert one.seconds == pytest.approx(7.2)
    assert one.tail_s[0] == pytest.approx(7.2 - 2.4)
    assert one.bound == "stragglers"


def test_a_call_brings_replies_when_they_have_ended():
    calls = Calls(call_s=0.01, request_s=0.0, poll_s=5.0)
    given = {"workers": 1, "episodes": 1, "turns": 1, "row_s": 0.0, "network_s": 0.1}
    # Reset and step there and back 0.4; the call 0.01, there and back 0.2, 10 tokens of 0.1 s.
    assert run(**given, calls=calls).seconds == pytest.approx(0.4 + 0.01 + 0.2 + 1.0)


def test_a_call_that_waits_in_vain_comes_back_and_is_made_again():
    calls = Calls(call_s=0.01, request_s=0.0, poll_s=0.3)
    given = {"workers": 1, "episodes": 1, "turns": 1, "row_s": 0.0, "network_s": 0.1}
    # Calls lie at the replica in [0, 0.3], [0.51, 0.81]; the next arrives at 1.02, after the end.
    found = run(**given, calls=calls)
    assert found.seconds == pytest.approx(0.4 + 0.01 + 0.1 + 1.02 + 0.1)
    assert found.turn_s["calls"] == pytest.approx(0.01 + 0.1 + 0.02 + 0.1)


def test_calls_of_many_replicas_cost_the_driver():
    many = {"workers": 640, "episodes": 640, "replicas": 80, "turns": 3}
    calls = Calls(call_s=250e-6, request_s=20e-6, poll_s=0.02)
    found = run(**many, calls=calls)
    # Nearly 50 calls a second of each of 80 replicas, 0.25 ms each.
    assert found.driver_share > 0.6
    assert run(**many).driver_share == 0.0


def test_a_simulation_repeats_with_its_seed():
    noisy = {"env_s": Spread(median=0.5, sigma=1.0), "workers": 50, "episodes": 50}
    assert run(**noisy, seed=3).seconds == run(**noisy, seed=3).seconds
    assert run(**noisy, seed=3).seconds != run(**noisy, seed=4).seconds
