"""Healthy, collapsed, cannot tell: from intervals and p-values, on levels made by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from moored.diagnostics import (
    CollapseWatch,
    Level,
    Regime,
    Thresholds,
    Verdict,
    VerdictTracker,
    information,
    judge,
    judge_series,
    pool,
)
from moored.diagnostics.verdict import regime_of
from moored.errors import MooredError

HEALTHY, COLLAPSED, CANNOT_TELL = Verdict.HEALTHY, Verdict.COLLAPSED, Verdict.CANNOT_TELL

SOUND = Level(
    num_looks=1,
    num_prompts=8,
    num_degrees=7,
    mi=1.0,
    mi_se=0.05,
    ceiling_share=0.6,
    ceiling_share_se=0.05,
    dependence=0.5,
    dependence_se=0.05,
    entropy=1.0,
    p_value=0.001,
)
EMPTY = replace(SOUND, mi=0.01, mi_se=0.01, ceiling_share=0.01, dependence=0.02, p_value=0.4)
EMPTY = replace(EMPTY, ceiling_share_se=0.01)


def look(rng, num_prompts: int, num_rows: int, noise: float):
    """Prompts are points, reasonings are noisy copies of them; log-densities."""
    points = rng.normal(size=num_prompts)
    columns = np.arange(num_rows) % num_prompts
    copies = points[columns] + noise * rng.normal(size=num_rows)
    logp = -0.5 * ((copies[:, None] - points) / noise) ** 2
    return information(logp, columns, np.full(num_rows, 5), permutations=199)


def test_dependence_that_is_established_is_healthy_and_its_reason_has_the_numbers():
    found = judge(SOUND, start=SOUND)
    # 7 degrees of freedom: a 99 % interval is 3.50 standard errors wide on each side.
    assert found.verdict is HEALTHY and found.prompts_needed is None
    assert "60% (99 % interval 43% to 77%, floor 10%)" in found.why
    assert "p = 0.001, from 8 prompts" in found.why


def test_mi_that_surely_lies_below_its_floor_is_collapsed():
    found = judge(EMPTY)
    assert found.verdict is COLLAPSED and found.prompts_needed is None
    assert "1% (99 % interval -2% to 4%, floor 10%)" in found.why


def test_dependence_above_chance_is_collapsed_when_mi_is_far_below_the_start():
    weak = replace(SOUND, mi=0.05, mi_se=0.01)
    assert judge(weak).verdict is HEALTHY
    found = judge(weak, start=SOUND)
    assert found.verdict is COLLAPSED
    # MI per sequence is 60 % of its ceiling: "hardly depends" would be wrong.
    assert found.why.startswith("Reasoning depends on its prompt far less than at the start of the")
    gone = replace(EMPTY, mi=0.01)
    assert judge(gone, start=SOUND).why.startswith("Reasoning hardly depends on its prompt: MI, as")


def test_a_large_p_value_is_never_healthy():
    found = judge(replace(SOUND, p_value=0.446))
    assert found.verdict is CANNOT_TELL
    assert "p = 0.446" in found.why


def test_an_interval_that_holds_the_floor_cannot_tell_and_says_how_many_prompts_would():
    # 0.2 above its floor by 0.1 with an error of 0.1 from 8 prompts; it takes 1 / 3.5 errors to
    # clear at 7 degrees, fewer with more prompts: 2.576 ** 2 * 8 = 53, and a little more.
    wide = replace(SOUND, ceiling_share=0.2, ceiling_share_se=0.1, dependence=0.2)
    found = judge(replace(wide, dependence_se=0.1))
    assert found.verdict is CANNOT_TELL
    assert found.prompts_needed is not None and 53 <= found.prompts_needed <= 65
    assert f"about {found.prompts_needed} prompts are needed" in found.why


def test_a_p_value_that_is_not_small_enough_says_how_many_prompts_would_make_it_so():
    # 1.751 errors above chance from 8 prompts, and 0.01 takes 2.326: (2.326 / 1.751)² · 8 = 14.1.
    found = judge(replace(SOUND, p_value=0.04))
    assert (found.verdict, found.prompts_needed) == (CANNOT_TELL, 15)
    # 0.05 takes 1.645, which is there: the p-value is no reason to ask for more.
    lenient = Thresholds(max_p_value=0.05)
    assert judge(replace(SOUND, p_value=0.04), thresholds=lenient).verdict is HEALTHY
    found = judge(replace(SOUND, p_value=0.06), thresholds=lenient)
    assert found.prompts_needed == 9  # (1.645 / 1.555)² · 8 = 8.95


def test_an_interval_that_holds_more_than_everything_is_not_given_in_figures():
    blurred = replace(SOUND, ceiling_share=0.2, ceiling_share_se=9.0, p_value=0.1)
    assert "is 20% (99 % interval wider than ±100%, floor 10%)" in judge(blurred).why


def test_retrieval_far_above_chance_contradicts_an_mi_pulled_down_by_a_few_reasonings():
    pulled = replace(SOUND, ceiling_share=-2.0, ceiling_share_se=0.3)
    assert judge(pulled).verdict is HEALTHY
    assert judge(replace(pulled, dependence=0.0)).verdict is COLLAPSED


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0, 20.0])
def test_two_prompts_cannot_tell_and_eight_are_asked_for(noise):
    rng = np.random.default_rng(0)
    for _ in range(20):
        report = look(rng, 2, 16, noise)
        assert (report.verdict, report.regime) == (CANNOT_TELL, None)
        assert "2 prompts cannot tell" in report.why


def test_four_prompts_with_a_large_p_value_cannot_tell():
    rng = np.random.default_rng(3)
    reports = [look(rng, 4, 8, 1.0) for _ in range(100)]
    unclear = [report for report in reports if report.p_values["mi_seq_estimate"] > 0.2]
    assert len(unclear) > 10
    assert {report.verdict for report in unclear} <= {CANNOT_TELL, COLLAPSED}
    assert sum(report.verdict is CANNOT_TELL for report in unclear) >= 0.9 * len(unclear)


def test_reasonings_of_one_prompt_cannot_tell():
    report = information([[-1.0, -9.0], [-1.0, -9.0]], [0, 0], [1, 1])
    assert (report.verdict, report.regime) == (CANNOT_TELL, None)
    assert report.why == "Reasonings of one prompt cannot tell; at least 8 prompts are needed."


@pytest.mark.parametrize("num_rows", [4, 16])
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 20.0])
def test_a_stationary_series_of_two_prompts_never_flips(num_rows, noise):
    rng = np.random.default_rng(5)
    for _ in range(6):
        watch = CollapseWatch()
        found = {watch.update(step, look(rng, 2, num_rows, noise)).verdict for step in range(30)}
        assert not found >= {HEALTHY, COLLAPSED}


def test_small_looks_reach_a_verdict_together():
    rng = np.random.default_rng(6)
    healthy, collapsed = CollapseWatch(), CollapseWatch()
    grounded = [healthy.update(step, look(rng, 4, 16, 0.1)) for step in range(16)]
    template = [collapsed.update(step, look(rng, 2, 16, 50.0)) for step in range(16)]
    assert grounded[-1].verdict is HEALTHY and template[-1].verdict is COLLAPSED
    assert template[0].verdict is CANNOT_TELL
    assert "over the last" in template[-1].why


def test_pooled_looks_are_weighted_by_their_prompts_and_count_their_scatter():
    small = replace(SOUND, num_prompts=4, num_degrees=3, mi=0.7, mi_se=0.0, p_value=0.01)
    large = replace(SOUND, num_prompts=12, num_degrees=11, mi=1.1, mi_se=0.0, p_value=0.01)
    both = pool([small, large])
    assert (both.num_looks, both.num_prompts) == (2, 16)
    assert both.mi == pytest.approx(1.0)
    # 0.25 * 0.3 ** 2 + 0.75 * 0.1 ** 2 = 0.03: more than the errors of zero say, from two looks.
    assert both.mi_se == pytest.approx(0.03**0.5)
    assert both.num_degrees == 1
    # Fisher: exp(-x) (1 + x) at x = -2 log 0.01.
    assert both.p_value == pytest.approx(1e-4 * (1 - 2 * np.log(0.01)))


def test_looks_at_the_same_prompts_pool_to_no_smaller_error_than_one_of_them():
    first = replace(SOUND, prompts=tuple(range(8)))
    others = replace(SOUND, prompts=tuple(range(8, 16)))
    again = pool([first] * 4)
    assert (again.num_looks, again.num_prompts, again.num_degrees) == (4, 8, 7)
    assert again.mi_se == pytest.approx(0.05) and again.prompts == first.prompts
    # New prompts count in full: half the variance, 16 prompts less two means.
    both = pool([first, others])
    assert (both.num_prompts, both.num_degrees) == (16, 14)
    assert both.mi_se == pytest.approx(0.05 / np.sqrt(2.0))
    # Half of the prompts are the same: the variance of a mean is (1 + 1/2) / 2 of that of one.
    half = pool([first, replace(SOUND, prompts=tuple(range(4, 12)))])
    assert half.num_prompts == 12 and half.mi_se == pytest.approx(0.05 * np.sqrt(0.75))


def test_the_same_few_prompts_at_every_look_are_not_taken_for_many():
    # Prompts differ, and their mean of 16 % is above the floor of 10 %. Eight of them may lie below
    # by chance, which looking at them again does not make any surer.
    rng = np.random.default_rng(3)
    wrong = {True: 0, False: 0}
    for _ in range(200):
        shares = rng.normal(0.16, 0.25, size=(8, 8))
        for is_same in wrong:
            looks = []
            for t in range(8):
                values = shares[0 if is_same else t] + rng.normal(0.0, 0.05, size=8)
                mean, error = values.mean(), values.std(ddof=1) / np.sqrt(8)
                keys = range(8) if is_same else range(8 * t, 8 * t + 8)
                looks.append(
                    replace(
                        SOUND,
                        ceiling_share=mean,
                        ceiling_share_se=error,
                        dependence=mean,
                        dependence_se=error,
                        prompts=tuple(keys),
                    )
                )
            wrong[is_same] += judge_series(looks).verdict is COLLAPSED
    assert wrong[False] <= 1 and wrong[True] <= 4


PAIR = replace(SOUND, num_prompts=2, num_degrees=0, mi_se=0.0, ceiling_share_se=0.0)
PAIR = replace(PAIR, dependence_se=0.0)


def test_looks_without_standard_errors_are_as_sure_as_their_scatter():
    pooled = pool([replace(PAIR, mi=mi) for mi in (1.0, 2.0, 3.0, 2.0)])
    # Deviations -1, 0, 1, 0: (1 + 1) / (4 * 3), from four looks and not from eight prompts.
    assert (pooled.mi, pooled.mi_se) == (pytest.approx(2.0), pytest.approx((1 / 6) ** 0.5))
    assert (pooled.num_prompts, pooled.num_degrees) == (8, 3)
    assert pool([PAIR] * 4).num_degrees == 3


def test_a_start_of_unknown_error_is_the_first_looks_together():
    tracker, pairs = VerdictTracker(), [replace(PAIR, mi=mi) for mi in (9.0, 1.0, 2.0, 4.0, 1.0)]
    starts = []
    for level in pairs:
        tracker.update(level)
        starts.append(tracker.state_dict()["start"])
    assert starts[:3] == [None] * 3
    assert starts[3]["mi"] == starts[4]["mi"] == pytest.approx(4.0)
    sure = VerdictTracker()
    sure.update(SOUND)
    assert sure.state_dict()["start"]["mi"] == SOUND.mi


def test_a_start_of_unknown_error_is_nothing_to_compare_with():
    # A pair that happens to lie far apart: MI of 1 is a ninth of it, and no sign of a collapse.
    far = replace(PAIR, mi=9.0)
    assert judge(SOUND, start=far) == judge(SOUND) and judge(SOUND).verdict is HEALTHY
    assert judge(SOUND, start=replace(far, num_degrees=7)).verdict is COLLAPSED


def test_prompts_without_standard_errors_cannot_tell():
    found = judge(replace(SOUND, num_degrees=0))
    assert found.verdict is CANNOT_TELL and found.prompts_needed is None
    assert found.why == "8 prompts cannot tell: the standard errors of the look are not known."
    assert judge(PAIR).prompts_needed == 8


def test_equal_looks_pool_to_smaller_errors():
    both = pool([SOUND] * 4)
    assert both.mi_se == pytest.approx(0.05 / 2)
    assert (both.num_degrees, both.num_prompts) == (28, 32)


def test_a_look_that_contradicts_earlier_ones_is_not_pooled_with_them():
    fallen = replace(SOUND, mi=0.3, mi_se=0.05, ceiling_share=0.15, dependence=0.1)
    assert judge(fallen, start=SOUND).verdict is CANNOT_TELL
    assert judge(pool([*[SOUND] * 7, fallen]), start=SOUND).verdict is HEALTHY
    assert judge_series([*[SOUND] * 7, fallen], start=SOUND).verdict is CANNOT_TELL


def test_a_verdict_is_overturned_by_two_looks_in_a_row():
    tracker = VerdictTracker()
    series = [SOUND, SOUND, EMPTY, SOUND, EMPTY, EMPTY]
    found = [tracker.update(level)[0].verdict for level in series]
    assert found == [HEALTHY, HEALTHY, CANNOT_TELL, HEALTHY, CANNOT_TELL, COLLAPSED]


def test_collapse_is_left_only_beyond_the_hysteresis():
    level = replace(SOUND, ceiling_share=0.14, ceiling_share_se=0.001)
    level = replace(level, dependence=0.14, dependence_se=0.001)
    assert judge(level, previous=HEALTHY).verdict is HEALTHY
    assert judge(level, previous=COLLAPSED).verdict is COLLAPSED


def test_regimes_name_the_corners_of_the_plane():
    assert regime_of(HEALTHY, 1.0) is Regime.DIVERSE
    assert regime_of(HEALTHY, 0.01) is Regime.COMPRESSED
    assert regime_of(COLLAPSED, 1.0) is Regime.TEMPLATE_COLLAPSE
    assert regime_of(COLLAPSED, 0.01) is Regime.LOW_ENTROPY_COLLAPSE
    assert regime_of(CANNOT_TELL, 1.0) is None


def test_entropy_is_low_relative_to_the_start_and_absolutely():
    assert regime_of(HEALTHY, 0.4, start_entropy=1.0) is Regime.COMPRESSED
    assert regime_of(HEALTHY, 0.6, start_entropy=1.0) is Regime.DIVERSE
    assert regime_of(HEALTHY, 0.04, start_entropy=0.04) is Regime.COMPRESSED
    for entropy, after in ((0.6, Regime.COMPRESSED), (0.8, Regime.DIVERSE)):
        kept = regime_of(HEALTHY, entropy, start_entropy=1.0, previous=Regime.COMPRESSED)
        assert kept is after


def test_tracker_continues_from_its_saved_state():
    series = [SOUND, EMPTY, EMPTY, SOUND, SOUND]
    whole, begun, resumed = VerdictTracker(), VerdictTracker(), VerdictTracker()
    expected = [whole.update(level) for level in series]
    found = [begun.update(level) for level in series[:2]]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert found + [resumed.update(level) for level in series[2:]] == expected


def test_a_level_is_plain_data():
    keys = [bytes([k] * 32) for k in range(8)]
    level = Level.of(look(np.random.default_rng(0), 8, 64, 0.3), keys)
    assert len(level.prompts) == 8
    assert Level.read(json.loads(json.dumps(asdict(level)))) == level


def test_hysteresis_below_one_is_refused():
    with pytest.raises(MooredError, match="hysteresis"):
        Thresholds(hysteresis=0.5)


def test_mi_that_is_spread_over_longer_reasonings_is_no_collapse():
    start = replace(SOUND, length=20.0)
    diluted = replace(SOUND, mi=0.1, mi_se=0.005)
    assert judge(diluted, start=start).verdict is Verdict.COLLAPSED
    found = judge(replace(diluted, length=200.0), start=start)
    assert found.verdict is Verdict.HEALTHY
    assert "MI times length (10.0 times the start's), as a share of the run's start, is 100%" in (
        found.why
    )
    # Not all of it is dilution: 10 times the length, and a hundredth of MI.
    lost = judge(replace(diluted, mi=0.01, mi_se=0.0005, length=200.0), start=start)
    assert lost.verdict is Verdict.COLLAPSED and "10%" in lost.why
    # A little longer is judged as before.
    near = judge(replace(diluted, length=28.0), start=start)
    assert near == judge(diluted, start=start)


def test_pooled_looks_have_the_mean_length_of_their_prompts():
    looks = [replace(SOUND, length=10.0), replace(SOUND, num_prompts=24, length=30.0)]
    assert pool(looks).length == pytest.approx(25.0)
    assert pool([looks[0], SOUND]).length is None
