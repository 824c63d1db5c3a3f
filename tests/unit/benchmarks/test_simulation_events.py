"""Queues and replicas of the simulation, against closed forms and cases worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from simulation.events import Clock, Queue, Replica, Spread, spread_of


def ends(replica: Replica, clock: Clock, replies: list[tuple[float, float]]) -> list[float]:
    """Seconds at which replies of (arrival, tokens) end."""
    found = [0.0] * len(replies)

    def note(number: int) -> None:
        found[number] = clock.now

    for number, (second, tokens) in enumerate(replies):
        clock.at(
            second,
            lambda number=number, tokens=tokens: replica.write(tokens, lambda: note(number)),
        )
    clock.run()
    return found


def test_what_is_due_goes_by_time_and_then_in_the_order_of_asking():
    clock, seen = Clock(), []
    for name, second in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.at(second, lambda name=name: seen.append((name, clock.now)))
    clock.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_queue_with_random_arrivals_waits_as_long_as_the_formula_says(load):
    # M/D/1: mean wait = load * service / (2 * (1 - load)).
    clock, rng, service_s, num = Clock(), np.random.default_rng(1), 0.1, 60_000
    queue = Queue(clock)
    for second in np.cumsum(rng.exponential(service_s / load, num)).tolist():
        clock.at(second, lambda: queue.serve(service_s, lambda: None))
    clock.run()
    assert queue.waited_s / num == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)
    assert queue.busy_s / clock.now == pytest.approx(load, rel=0.02)


def test_two_servers_take_two_at_a_time():
    clock, done = Clock(), []
    queue = Queue(clock, servers=2)
    for _ in range(3):
        queue.serve(1.0, lambda: done.append(clock.now))
    clock.run()
    assert done == [1.0, 1.0, 2.0]


def test_a_step_of_a_replica_takes_longer_with_more_rows():
    # Both for 10 tokens at 0.2 s, then one alone for 10 tokens at 0.15 s.
    clock = Clock()
    replica = Replica(clock, 0.1, 0.05, max_rows=8)
    assert ends(replica, clock, [(0.0, 10), (0.0, 20)]) == pytest.approx([2.0, 3.5])
    assert replica.busy_s == pytest.approx(3.5)


def test_a_reply_that_comes_later_slows_the_others_from_then_on():
    # One alone for 1.5 s is at token 10 of 20; then both at 0.2 s: 2 s more; then 10 tokens alone.
    clock = Clock()
    replica = Replica(clock, 0.1, 0.05, max_rows=8)
    assert ends(replica, clock, [(0.0, 20), (1.5, 20)]) == pytest.approx([3.5, 5.0])


def test_rows_beyond_the_bound_wait_for_one_that_ends():
    clock = Clock()
    replica = Replica(clock, 0.1, 0.0, max_rows=1)
    assert ends(replica, clock, [(0.0, 10), (0.0, 5), (0.0, 5)]) == pytest.approx([1.0, 1.5, 2.0])


def test_measured_latencies_are_drawn_from_as_they_were():
    rng = np.random.default_rng(0)
    measured = rng.lognormal(-3.0, 1.0, 5000)
    drawn = spread_of(measured.tolist()).draw(rng, 50_000)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(measured, share), rel=0.15)
    assert drawn.max() <= measured.max()


def test_a_log_normal_spread_has_its_median_and_its_limit():
    drawn = Spread(median=2.0, sigma=1.0, most=10.0).draw(np.random.default_rng(0), 20_000)
    assert np.median(drawn) == pytest.approx(2.0, rel=0.03)
    # P(ln x > ln 5) of a standard normal: 5.4 %.
    assert np.mean(drawn == 10.0) == pytest.approx(0.0538, abs=0.006)
