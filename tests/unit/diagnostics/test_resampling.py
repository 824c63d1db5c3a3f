"""Influence, standard errors, blocks: against numbers by hand and recomputation from scratch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moored.diagnostics import information
from moored.diagnostics.information import (
    Likelihood,
    Retrieval,
    hit_if_MN,
    hit_without_MN,
)
from moored.diagnostics.report import Verdict
from moored.diagnostics.resampling import (
    bootstrap_means,
    column_effects,
    column_influence,
    permutation_p_values,
    standard_errors,
    t_quantile,
    two_way_error,
)
from moored.errors import MooredError


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


def one_block(value: list[float], without: np.ndarray) -> np.ndarray:
    """Effects where every prompt has one row, and further columns are a background."""
    rows = np.arange(len(value))
    owners = np.full(without.shape[1], -1)
    owners[rows] = rows
    return column_effects(np.array(value), without, rows, np.zeros_like(rows), rows, owners[None])


def test_prompts_without_column_influence_have_none():
    # A value that no other prompt enters: leaving one out changes only the mean over rows.
    value = [1.0, 2.0, 3.0, 4.0]
    effects = one_block(value, np.tile(np.array(value)[:, None], (1, 4)))
    np.testing.assert_allclose(effects, 0, atol=1e-12)


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
    # Three prompts, the last without rows. Prompt 0 raises row 1 from 1 to 2, prompt 1 lowers row
    # 0 from 3 to 1; the last lowers both, by 4 and 5. Less the mean of 1, -2, -4 and -5: 3.5 and
    # 0.5. Two prompts over two rows, centred: 1.5 and -1.5.
    without = np.array([[99.0, 3.0, 5.0], [1.0, 99.0, 7.0]])
    effects = one_block([1.0, 2.0], without)
    np.testing.assert_allclose(effects, [[0.0, 0.5], [3.5, 0.0]])
    np.testing.assert_allclose(column_influence(effects, 2), [1.5, -1.5])


def toy_channel(rng, num_prompts: int, num_rows: int = 64, noise: float = 0.3):
    """Prompts are points, reasonings are noisy copies of them; log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.arange(num_rows) % num_prompts
    copies = points[columns] + noise * rng.normal(size=num_rows)
    return -0.5 * ((copies[:, None] - points) / noise) ** 2, columns, np.full(num_rows, 5)


def test_a_standard_error_by_hand():
    # Three prompts with 2, 1 and 1 rows, mean 3. Deviations by prompt: (1 + 2 - 6) = -3, 0, 3, in
    # units of 4/3 rows a prompt: -9/4, 0, 9/4. Influences 1/4, 0, -1/4 leave -2, 0, 2:
    # sqrt((4 + 4) / (3 * 2)).
    found = standard_errors(
        np.array([[1.0, 2.0, 3.0, 6.0]]), np.array([[0.25, 0.0, -0.25]]), np.array([0, 0, 1, 2])
    )
    assert found == pytest.approx([math.sqrt(8 / 6)])


def test_every_report_has_standard_errors_without_a_draw():
    rng = np.random.default_rng(0)
    report = information(*toy_channel(rng, 8), permutations=0)
    assert set(report.standard_errors) == {
        "mi_estimate",
        "mi_seq_estimate",
        "retrieval_accuracy",
        "conditional_entropy_est",
        "conditional_entropy_seq_est",
    }
    logged = report.metrics("view")["view/mi_estimate_se"]
    assert logged == report.standard_errors["mi_estimate"] > 0.0
    one = information([[-1.0, -2.0]], [0], [1])
    assert one.standard_errors == {} and "view/mi_estimate_se" not in one.metrics("view")


def test_two_prompts_are_one_comparison_and_have_no_error_of_what_compares_them():
    # Either row is likelier by 3 nats under its own prompt: both gains are log(2 / (1 + e^-3)), so
    # that they have no spread, whatever two other prompts would give.
    two = information([[-1.0, -4.0], [-5.0, -2.0]], [0, 1], [1, 1], bootstrap=50)
    assert two.mi_seq_estimate == pytest.approx(math.log(2 / (1 + math.exp(-3))))
    entropies = {"conditional_entropy_est", "conditional_entropy_seq_est"}
    assert set(two.standard_errors) == set(two.intervals) == entropies
    # Entropies 1 and 2 of two prompts: sqrt((1/4 + 1/4) / (2 * 1)).
    assert two.standard_errors["conditional_entropy_est"] == pytest.approx(0.5)
    assert "view/mi_estimate_se" not in two.metrics("view")
    assert "2 prompts cannot tell: they are one comparison" in two.why
    three = information(-4.0 + 3.0 * np.eye(3), [0, 1, 2], np.ones(3), bootstrap=50)
    assert {"mi_estimate", "retrieval_accuracy"} < set(three.standard_errors) & set(three.intervals)


def test_standard_errors_agree_with_the_two_stage_bootstrap():
    rng = np.random.default_rng(1)
    reports = [information(*toy_channel(rng, 16), bootstrap=300) for _ in range(40)]
    # Draws count what two prompts do to each other twice; standard errors of retrieval do not.
    for name, expected in (
        ("mi_estimate", 1.0),
        ("mi_seq_estimate", 1.0),
        ("retrieval_accuracy", 1.2),
    ):
        ratio = [
            (r.intervals[name].high - r.intervals[name].low) / (3.92 * r.standard_errors[name])
            for r in reports
        ]
        assert np.median(ratio) == pytest.approx(expected, abs=0.15), name


@pytest.mark.parametrize("num_prompts", [8, 16, 64])
def test_standard_errors_are_the_spread_of_fresh_looks_and_cover_at_95_percent(num_prompts):
    rng = np.random.default_rng(2)
    looks = [information(*toy_channel(rng, num_prompts), permutations=0) for _ in range(700)]
    for name in ("mi_estimate", "mi_seq_estimate", "conditional_entropy_est"):
        values = np.array([getattr(look, name) for look in looks])
        errors = np.array([look.standard_errors[name] for look in looks])
        assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(), rel=0.2), name
        inside = np.abs(values - values.mean()) <= t_quantile(num_prompts - 1) * errors
        assert inside.mean() == pytest.approx(0.945, abs=0.025), name


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)]
)
def test_quantiles_of_students_t(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, rel=0.003)


def test_rows_of_two_blocks_are_each_measured_against_their_own_columns():
    # Two blocks of two prompts; each row is certain of its own column: log 2 nats per sequence.
    logp = np.where(np.array([[1, 0], [0, 1], [1, 0], [0, 1]]) > 0, 0.0, -50.0)
    columns = [0, 1, 0, 1]
    two = information(logp, columns, np.ones(4), blocks=[7, 7, 3, 3])
    assert two.mi_seq_estimate == pytest.approx(math.log(2))
    assert (two.num_prompts, two.num_used_prompts, two.mi_upper_bound) == (2, 4, math.log(2))
    assert information(logp, columns, np.ones(4)).num_used_prompts == 2


def test_influence_in_blocks_equals_leaving_each_prompt_out_by_hand():
    # Blocks {0, 1} and {2, 3}, two columns each, one row a prompt. Leaving prompt (0, 0) out
    # leaves row 1 at without[1, 0] and rows 2, 3 as they are.
    value = np.array([1.0, 2.0, 3.0, 6.0])
    without = np.array([[99.0, 0.5], [1.0, 99.0], [99.0, 2.0], [4.0, 99.0]])
    columns, blocks = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    left_out = np.array([1.0 + 3 + 6, 0.5 + 3 + 6, 1 + 2 + 4.0, 1 + 2 + 2.0]) / 3
    expected = -3 * left_out - (value - 3.0)
    each, owners = np.arange(4), np.arange(4).reshape(2, 2)
    found = column_effects(value, without, columns, blocks, each, owners)
    np.testing.assert_allclose(column_influence(found, 4), expected - expected.mean())


def test_columns_of_a_task_count_together_and_not_for_its_own_rows():
    # The same with tasks {0, 3} and {1, 2}: every pair of a block is of two tasks. Effects 1 - 0.5,
    # 2 - 1, 3 - 2 and 6 - 4, less their mean 1.125; prompts 0 and 3 act on rows 1 and 2.
    value = np.array([1.0, 2.0, 3.0, 6.0])
    without = np.array([[99.0, 0.5], [1.0, 99.0], [99.0, 2.0], [4.0, 99.0]])
    columns, blocks = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    owners = np.array([[0, 1], [1, 0]])
    found = column_effects(value, without, columns, blocks, np.array([0, 1, 1, 0]), owners)
    np.testing.assert_allclose(found, [[0.0, -0.625 + 0.875], [-0.125 - 0.125, 0.0]])
    one_task = column_effects(value, without, columns, blocks, np.zeros(4, int), 0 * owners)
    assert one_task.tolist() == [[0.0]]


def test_columns_are_permuted_within_a_block_only():
    # Row values depend on the column alone, and each block has one column: every pairing within
    # blocks is the observed one (p = 1), pairings across blocks would not be.
    value_if = np.tile(np.array([0.0, 1.0]), (1, 4, 1)) * np.array([1.0, 1.0, 5.0, 5.0])[:, None]
    columns, blocks = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])
    draw = {"draws": 199, "rng": np.random.default_rng(0)}
    assert permutation_p_values(value_if, columns, blocks, **draw) == pytest.approx([1.0])
    assert permutation_p_values(value_if, columns, **draw)[0] < 0.5


def test_blocks_that_cannot_be_used_are_refused():
    logp = [[-1.0, -2.0], [-2.0, -1.0]]
    with pytest.raises(MooredError, match="one number per row, 2, got"):
        information(logp, [0, 1], [1, 1], blocks=[0])
    with pytest.raises(MooredError, match="blocks must be whole numbers"):
        information(logp, [0, 1], [1, 1], blocks=[0, 0.5])
    with pytest.raises(MooredError, match="cannot be used with blocks"):
        information(logp, [0, 1], [1, 1], blocks=[0, 0], prompt_keys="ab")


def test_prompts_of_one_task_count_once_in_a_standard_error():
    # Two tasks with two prompts each, one row a prompt, rows of a task alike: deviations -1, 1,
    # -1, 1. By task -2 and 2, times 2 tasks over 4 rows: -1 and 1; variance 2 / (2 * 1) = 1.
    value, tasks = np.array([[1.0, 3.0, 1.0, 3.0]]), np.array([0, 1, 0, 1])
    assert standard_errors(value, np.zeros((1, 2)), tasks) == pytest.approx(1.0)
    as_four = standard_errors(value, np.zeros((1, 4)), np.arange(4))
    assert as_four == pytest.approx(math.sqrt(4 / (4 * 3)))


def test_what_two_tasks_do_to_each_other_counts_once():
    # Four tasks, a row each, values alike: only effects vary. Tasks 0 and 1 take 1 from each other
    # and so do 2 and 3, 0 and 2 give 1 each, and 1 and 3; no task stands out, so nothing is left of
    # the variance but a least of 0. In the sum of a task's effects all cancels.
    effects = np.zeros((4, 4))
    for a, c, effect in ((0, 1, -1.0), (2, 3, -1.0), (0, 2, 1.0), (1, 3, 1.0)):
        effects[a, c] = effects[c, a] = effect
    value, tasks = np.ones(4), np.arange(4)
    assert two_way_error(value, effects, tasks) == 0.0
    # Tasks that do the same to all others add up: nothing is counted twice.
    additive = np.array([1.0, -1.0, 2.0, -2.0]) * (1.0 - np.eye(4))
    plain = standard_errors(value[None], column_influence(additive, 4)[None], tasks)
    assert two_way_error(value, additive, tasks) == pytest.approx(plain[0])
    # With rows 1, 2, 3, 4 as well, the first effects leave the 1.6667 / 4 of the rows alone: the
    # residual is -2 twice and 2 twice, and would take 16 / 16 away.
    assert two_way_error(np.arange(4.0), effects, tasks) == pytest.approx(math.sqrt(5 / 12))


def test_many_turns_of_two_tasks_cannot_tell():
    # Five turn numbers of two tasks, every row certain that it does not matter: MI is exactly 0.
    turns, rows = 5, 10
    columns, blocks = np.tile([0, 1], turns), np.repeat(np.arange(turns), 2)
    options = {"lengths": np.ones(rows), "blocks": blocks}
    as_tasks = information(np.full((rows, 2), -1.0), columns, **options, tasks=columns)
    assert as_tasks.num_used_prompts == 2
    assert as_tasks.verdict is Verdict.CANNOT_TELL
