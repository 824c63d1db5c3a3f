"""Whole simulations, against cases worked out by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moored.errors import MooredError

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

from simulation import run as simulation  # noqa: E402
from simulation.calls import Calls, Line  # noqa: E402
from simulation.events import Clock, Queue, Spread  # noqa: E402
from simulation.model import Outcome, Scenario, simulate  # noqa: E402


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
        # Overlapped: the first rollout, 3 rollouts that the update hides behind, the last update.
        # Nothing is sampled while weights are published.
        (2.0, 1, 2.8 + 3 * (2.8 + 0.5) + 2.0 + 0.5),
        # The update bounds: a rollout, then 4 updates.
        (4.0, 1, 2.8 + 4 * 4.5),
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


def test_a_request_and_its_reply_cost_the_driver_once():
    calls = Calls(call_s=0.0, request_s=0.02, poll_s=60.0)
    found = run(workers=1, calls=calls)
    # 4 episodes of 2 replies each.
    assert found.driver_share * found.seconds == pytest.approx(8 * 0.02)


def test_a_reply_that_ends_while_a_call_is_on_its_way_back_waits_for_the_next():
    clock, taken = Clock(), {}
    line = Line(clock, Queue(clock), Calls(call_s=0.0, request_s=0.0, poll_s=0.2), network_s=0.1)
    for name, seconds in {"a": 0.5, "b": 0.15}.items():
        line.submit(
            lambda done, seconds=seconds: clock.after(seconds, done),
            lambda name=name: taken.update({name: clock.now}),
        )
    clock.run()
    # The first call has only a, and comes back in vain: at the replica from 0.1 to 0.3. The second
    # brings b at 0.5 and leaves with a at 0.6, before b ends at 0.65. The third finds b at 0.8.
    assert taken == {"a": pytest.approx(0.7), "b": pytest.approx(0.9)}


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


@pytest.mark.parametrize("mode", ["stream", "lockstep"])
@pytest.mark.parametrize("calls", [None, Calls(call_s=3e-4, request_s=1e-5, poll_s=0.02)])
@pytest.mark.parametrize(
    ("workers", "episodes", "turns"), [(1, 1, 1), (1, 7, 2), (7, 1, 3), (30, 100, 2), (100, 30, 1)]
)
def test_every_episode_that_begins_ends(mode, calls, workers, episodes, turns):
    found = run(
        mode=mode,
        calls=calls,
        workers=workers,
        episodes=episodes,
        turns=turns,
        replicas=3,
        num_steps=2,
        reply_tokens=Spread(median=10.0, sigma=0.5),
        env_s=Spread(median=0.1, sigma=1.0),
        env_calls=5,
        driver_turn_s=0.001,
        network_s=0.001,
        max_rows=4,
        update_s=0.3,
        publish_s=0.1,
        max_lag=1,
    )
    assert found.num_turns == 2 * episodes * turns
    assert found.turns_per_s * found.seconds == pytest.approx(found.num_turns)
    assert len(found.rollout_s) == len(found.tail_s) == 2


@pytest.mark.parametrize("calls", [None, Calls(call_s=0.01, request_s=0.002, poll_s=0.3)])
def test_the_seconds_of_a_lone_worker_are_those_of_the_parts(calls):
    found = run(
        workers=1, env_s=Spread(median=0.7), driver_turn_s=0.02, network_s=0.05, calls=calls
    )
    assert sum(found.turn_s.values()) * found.num_turns == pytest.approx(found.seconds)


def test_parts_that_take_no_time_are_no_trouble():
    still = {"step_s": 0.0, "row_s": 0.0}
    assert run(**still, env_s=Spread(median=1.0)).seconds == pytest.approx(3.0)
    nothing = run(**still)
    assert (nothing.seconds, nothing.num_turns) == (0.0, 8)
    assert nothing.turns_per_s == float("inf")


def test_the_tail_begins_when_95_percent_have_ended():
    # One after the other, 2.2 s each: of 4 all have to end, of 21 twenty.
    assert run(workers=1).tail_s == [0.0]
    assert run(workers=1, episodes=21).tail_s[0] == pytest.approx(2.2)


def test_a_step_that_waits_for_the_learner_says_so():
    assert run(num_steps=3, update_s=2.0).bound == "sampler"
    assert run(num_steps=3, update_s=4.0).bound == "learner"
    assert run(num_steps=3, update_s=2.0, publish_s=2.0, max_lag=1).bound == "learner"


def test_a_driver_bounds_rollouts_however_long_updates_take_beside_them():
    slow = {"workers": 100, "episodes": 100, "driver_turn_s": 0.01, "step_s": 1e-6, "row_s": 0.0}
    found = run(**slow, update_s=2.0)
    # 100 x 2.5 x 10 ms are 2.5 s of 4.5 s.
    assert found.driver_share == pytest.approx(2.5 / 4.5, rel=1e-3)
    assert found.bound == "driver"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("workers", "replicas", "episodes", "turns", "num_steps")),
        *(("drivers", 0), ("max_rows", 0), ("env_calls", 0), ("max_lag", 2), ("max_lag", -1)),
        *(("step_s", -1.0), ("network_s", float("inf")), ("update_s", float("nan"))),
        *(("slow_share", 1.5), ("slow_factor", 0.0)),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(MooredError, match=f"{name} must be "):
        run(**{name: value})


def test_calls_that_never_wait_are_refused():
    with pytest.raises(MooredError, match="time would stand still"):
        Calls(call_s=0.0, request_s=0.0, poll_s=0.0)


def test_the_stored_numbers_are_those_of_the_code_of_today():
    stored = json.loads((ROOT / "benchmarks" / "results" / "simulation.json").read_text())
    for name, way in {"streams": {}, "lockstep": {"mode": "lockstep"}}.items():
        found = simulation.record(simulation.simulate_seeds(simulation.scenario(100, **way)))
        assert found == stored["growth"][name]["100"]


def test_seeds_are_taken_together_as_steps_of_one_run():
    given = simulation.scenario(10, env_s=simulation.REMOTE)
    found = simulation.simulate_seeds(given)
    alone = [simulate(replace(given, seed=seed)) for seed in simulation.SEEDS]
    assert found.num_turns == 3 * 2 * 10 * 5
    assert found.turns_per_s == pytest.approx(found.num_turns / sum(one.seconds for one in alone))
    busy_s = sum(one.driver_share * one.seconds for one in alone)
    assert found.driver_share * found.seconds == pytest.approx(busy_s)
    assert len(found.rollout_s) == 6


def test_a_driver_alone_handles_the_turns_that_were_measured():
    # The measured seconds hold the beginnings of episodes: they must not be charged twice.
    still = {"reply_tokens": Spread(median=1.0), "step_s": 0.0, "row_s": 0.0}
    found = simulate(simulation.scenario(200, **still, turns=5, network_s=0.0))
    assert found.bound == "driver"
    assert found.turns_per_s == pytest.approx(simulation.DRIVER_TURNS_PER_S, rel=0.01)
