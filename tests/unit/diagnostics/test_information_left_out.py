"""Leave-one-prompt-out values against recomputation from scratch."""

from __future__ import annotations

import numpy as np
import pytest

from moored.diagnostics.information import (
    Likelihood,
    Retrieval,
    bootstrap_means,
    hit_if_MN,
    hit_without_MN,
    prompt_influence,
)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_leaving_a_prompt_out_equals_scoring_without_it(scale):
    rng = np.random.default_rng(0)
    logp = scale * rng.normal(size=(7, 5))
    columns = rng.integers(5, size=7)
    whole = Likelihood.of(logp, columns)
    gains = whole.gain_without_MN()
    hits = hit_without_MN(whole, Retrieval.of(whole))
    for j in range(5):
        rows = columns != j
        rest = Likelihood.of(np.delete(logp, j, axis=1)[rows], (columns - (columns > j))[rows])
        np.testing.assert_allclose(gains[rows, j], rest.gain_M, rtol=1e-9)
        np.testing.assert_allclose(hits[rows, j], Retrieval.of(rest).hit_M())


def test_hit_if_is_the_hit_of_the_own_prompt():
    rng = np.random.default_rng(1)
    logp = rng.integers(-3, 0, size=(20, 4)).astype(float)  # many ties
    columns = rng.integers(4, size=20)
    hits = Retrieval.of(Likelihood.of(logp, columns)).hit_M()
    np.testing.assert_allclose(hit_if_MN(logp)[np.arange(20), columns], hits)
    np.testing.assert_allclose(hit_if_MN(logp).sum(axis=1), 1)


def test_prompts_without_column_influence_have_none():
    # A value that no other prompt enters: leaving one out changes only the mean over rows.
    value = np.array([1.0, 2.0, 3.0, 4.0])
    columns = np.arange(4)
    influence = prompt_influence(value, np.tile(value[:, None], (1, 4)), columns)
    np.testing.assert_allclose(influence, 0, atol=1e-12)


def test_bootstrap_of_unequal_groups_has_the_spread_of_the_two_stage_draw():
    rng = np.random.default_rng(2)
    columns = np.array([0, 0, 0, 1, 2, 2])
    value = np.array([[1.0, 2.0, 3.0, 10.0, 0.0, 4.0]])
    means = bootstrap_means(value, np.zeros((1, 3)), columns, draws=5_000, rng=rng)
    by_hand = []
    for _ in range(5_000):
        picks = [np.flatnonzero(columns == p) for p in rng.integers(3, size=3)]
        rows = np.concatenate([rng.choice(rows, size=len(rows)) for rows in picks])
        by_hand.append(value[0, rows].mean())
    assert means.mean() == pytest.approx(np.mean(by_hand), abs=0.1)
    assert means.std() == pytest.approx(np.std(by_hand), rel=0.05)


def test_prompts_without_rows_take_no_part_in_the_influence():
    # Three prompts, the last without rows. Leaving prompt 0 out leaves row 1 at 1, leaving prompt
    # 1 out leaves row 0 at 3. Pseudo-values -1 and -3, own rows' parts -0.5 and 0.5: -0.5 and
    # -3.5, centred 1.5 and -1.5.
    without = np.array([[99.0, 3.0, 5.0], [1.0, 99.0, 7.0]])
    influence = prompt_influence(np.array([1.0, 2.0]), without, np.array([0, 1]))
    np.testing.assert_allclose(influence, [1.5, -1.5, 0.0])
