"""Advantages against loops written from their definitions, on random input."""

from __future__ import annotations

import math
import statistics

import numpy as np

from moored.algo import bilevel_gae, dr_grpo, gae, grpo, rloo

NAN = math.nan


def ragged_batch(rng, num_groups: int = 7):
    """Interleaved rows of unequal groups, one row in eight without a reward."""
    sizes = rng.integers(1, 9, num_groups)
    ids = rng.permutation(np.repeat(np.arange(num_groups) * 10, sizes))
    rewards = rng.integers(0, 4, len(ids)) / 4 + rng.choice([0.0, 1e4])
    return np.where(rng.random(len(ids)) < 1 / 8, NAN, rewards), ids


def members(rewards, ids) -> dict[int, list[int]]:
    """Rows of each group that have a reward, groups in order of first appearance."""
    rows: dict[int, list[int]] = {int(i): [] for i in dict.fromkeys(ids.tolist())}
    for row, label in enumerate(ids.tolist()):
        if math.isfinite(rewards[row]):
            rows[label].append(row)
    return rows


def test_group_advantages_equal_a_loop_over_ragged_interleaved_groups():
    rng = np.random.default_rng(3)
    for _ in range(50):
        rewards, ids = ragged_batch(rng)
        expected = {name: np.zeros(len(ids)) for name in ("grpo", "dr_grpo", "rloo")}
        for rows in members(rewards, ids).values():
            for row in rows:
                own = [rewards[r] for r in rows]
                others = [rewards[r] for r in rows if r != row]
                centred = rewards[row] - statistics.mean(own)
                expected["grpo"][row] = centred / (statistics.pstdev(own) + 1e-6)
                expected["dr_grpo"][row] = centred
                expected["rloo"][row] = rewards[row] - statistics.mean(others) if others else 0.0
        for estimator in (grpo, dr_grpo, rloo):
            got = estimator(rewards, ids)
            np.testing.assert_allclose(got, expected[estimator.__name__], atol=1e-6)


def slow_gae(rewards, values, gamma, lam) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), for one row without gaps."""
    deltas = [
        r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        for t, r in enumerate(rewards)
    ]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def test_gae_is_the_discounted_sum_of_deltas_over_sampled_tokens():
    rng = np.random.default_rng(5)
    for gamma, lam in ((1.0, 1.0), (0.9, 0.7), (0.5, 0.0), (0.0, 0.5)):
        rewards, values = rng.normal(size=(2, 6, 11))
        mask = rng.random((6, 11)) < 0.6
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        for row, inside in enumerate(mask):
            expected = slow_gae(rewards[row, inside], values[row, inside], gamma, lam)
            np.testing.assert_allclose(advantages[row, inside], expected)
            np.testing.assert_allclose(returns[row, inside], values[row, inside] + expected)
        assert not advantages[~mask].any() and not returns[~mask].any()


def test_bilevel_gae_is_gae_over_turn_ends_then_gae_inside_each_turn():
    rng = np.random.default_rng(6)
    gamma, lam, gamma_turn, lam_turn = 0.9, 0.8, 0.7, 0.6
    rewards, values = rng.normal(size=(2, 8, 12))
    mask = rng.random((8, 12)) < 0.7
    ends = mask & (rng.random((8, 12)) < 0.4)
    for row in range(8):
        ends[row, np.flatnonzero(mask[row])[-1]] = True
    got = bilevel_gae(rewards, values, mask, ends, gamma, lam, gamma_turn, lam_turn)
    for row in range(8):
        last = np.flatnonzero(ends[row])
        turn_level = slow_gae(rewards[row, last], values[row, last], gamma_turn, lam_turn)
        paid = rewards[row].copy()
        paid[last] = values[row, last] + turn_level
        start = 0
        for end in last:
            tokens = [t for t in range(start, end + 1) if mask[row, t]]
            expected = slow_gae(paid[tokens], values[row, tokens], gamma, lam)
            np.testing.assert_allclose(got.advantages[row, tokens], expected)
            np.testing.assert_allclose(got.returns[row, tokens], values[row, tokens] + expected)
            start = end + 1
