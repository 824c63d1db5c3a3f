"""What a series of verdicts amounts to, in one headline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from moored.analysis.diagnosis import FAR_STEPS, TRAINING, Diagnosis, Look, Series
from moored.analysis.findings import Finding, Kind, explanation, headline, interval_of, notes
from moored.diagnostics.alarm import Alarm
from moored.diagnostics.information import information
from moored.diagnostics.report import Regime, Verdict
from moored.diagnostics.watch import Watched

VERDICTS = {"h": Verdict.HEALTHY, "c": Verdict.COLLAPSED, "?": Verdict.CANNOT_TELL}
REGIMES = {"h": Regime.DIVERSE, "c": Regime.TEMPLATE_COLLAPSE, "?": None}
REPORT = information(np.eye(4) - 2.0, np.arange(4), np.ones(4))


def look(letter: str, steps: Sequence[int]) -> Look:
    watched = Watched(
        report=REPORT,
        verdict=VERDICTS[letter],
        why=f"Because of {letter}.",
        prompts_needed=None,
        regime=REGIMES[letter],
        alarm=None,
    )
    return Look(steps=tuple(steps), watched=watched, model="toy")


def series(letters: str, env: str | None = None, alarm: Alarm | None = None) -> Series:
    looks = tuple(look(letter, [10 * (k + 1)]) for k, letter in enumerate(letters))
    return Series(env=env, view="first_turn", looks=looks, alarm=alarm)


def diagnosis(*found: Series) -> Diagnosis:
    return Diagnosis(series=found, source="scored with toy", temperature=1.0)


ALARM = Alarm(
    step=20, kind=Regime.TEMPLATE_COLLAPSE, mi_level=0.0, mi_level_se=0.01, mi_reference=1.0
)


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("hhcc", "Collapsed since step 30"),
        ("hchcc", "Collapsed since step 40"),
        ("h?c?c", "Collapsed since step 30"),
        ("cc", "Collapsed from the first look on, step 10"),
        ("hch", "Healthy"),
        ("ccc?", "Cannot tell"),
    ],
)
def test_the_headline_is_the_last_verdict_and_since_when(letters, text):
    assert headline(diagnosis(series(letters))).text == text


def test_a_look_over_several_steps_collapsed_with_its_first():
    found = Series(
        env=None, view="first_turn", looks=(look("h", [1, 2]), look("c", [3, 4])), alarm=None
    )
    assert headline(diagnosis(found)).text == "Collapsed since step 3"
    nameless = Series(env=None, view="first_turn", looks=(look("c", []),), alarm=None)
    assert headline(diagnosis(nameless)).text == "Collapsed"


def test_an_alarm_that_was_followed_by_health_is_told():
    found = headline(diagnosis(series("hch", alarm=ALARM)))
    assert found.text == "Healthy again after the alarm of step 20" and found.kind is Kind.GOOD


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (("h", "h"), Verdict.HEALTHY),
        (("h", "?"), Verdict.CANNOT_TELL),
        (("?", "c"), Verdict.COLLAPSED),
    ],
)
def test_the_whole_is_as_well_as_its_worst_environment(verdicts, whole):
    found = diagnosis(*(series(letter, env=f"e{k}") for k, letter in enumerate(verdicts)))
    assert found.verdict is whole


def test_rows_that_name_no_environment_beside_others_that_do_are_the_rest():
    found = diagnosis(series("h", env="e"), series("c"))
    assert headline(found).text == "Collapsed since step 10 in the rest; healthy in e"
    assert [line.text.partition(":")[0] for line in explanation(found)] == ["e", "the rest"]


def test_only_a_collapse_after_health_is_answered_by_going_back_to_a_checkpoint():
    for letters in ("h", "hc", "c", "?c", "h?"):
        (line,) = explanation(diagnosis(series(letters)))
        assert line.text.startswith(f"Because of {letters[-1]}.")
        assert ("Go back to a checkpoint" in line.text) == (letters == "hc")
        assert ("No look shows it healthy" in line.text) == (letters in ("c", "?c"))


def test_a_model_that_did_not_write_the_texts_is_told_instead_of_a_remedy():
    scored, strange = series("hc"), replace(REPORT, conditional_entropy_est=5.0)
    watched = replace(scored.looks[-1].watched, report=strange)
    scored = replace(scored, looks=(scored.looks[0], replace(scored.looks[1], watched=watched)))
    assert headline(diagnosis(scored)).text == "Cannot tell"
    assert diagnosis(scored).verdict is scored.verdict is Verdict.CANNOT_TELL
    (line,) = explanation(diagnosis(scored))
    assert line.kind is Kind.BAD
    assert line.text.startswith("H(Z|X) is 5.0 nats per token: this model would not have written")
    assert scored.to_dict()["why"] == line.text
    assert [series("hc").to_dict()["is_foreign"], scored.to_dict()["is_foreign"]] == [False, True]
    # In training the model wrote them itself, however high its entropy is.
    looks = tuple(replace(look, model=TRAINING) for look in scored.looks)
    (line,) = explanation(diagnosis(replace(scored, looks=looks)))
    assert "Go back to a checkpoint" in line.text and "nats per token" not in line.text


@pytest.mark.parametrize("letters", ["hc", "hh"])
def test_weights_far_from_the_last_step_decide_nothing(letters):
    def scored_from(*steps_away: int):
        found = series(letters)
        pairs = zip(found.looks, steps_away, strict=True)
        return replace(found, looks=tuple(replace(look, steps_away=n) for look, n in pairs))

    stale = diagnosis(scored_from(0, FAR_STEPS + 1))
    assert stale.verdict is Verdict.CANNOT_TELL
    assert headline(stale) == Finding("Cannot tell", Kind.WARNING)
    (line,) = explanation(stale)
    assert line.kind is Kind.BAD and "11 steps away" in line.text
    for away, told in (((0, FAR_STEPS + 1), "step 20:"), ((FAR_STEPS + 1, 0), "step 10:")):
        (note,) = (x for x in notes(diagnosis(scored_from(*away))) if "stale" in x.text)
        assert note.kind is Kind.BAD and told in note.text
    # An early look alone does not decide, and weights may be a few steps old.
    for away in ((FAR_STEPS + 1, 0), (0, FAR_STEPS)):
        assert scored_from(*away).verdict is series(letters).verdict


def test_a_run_that_began_without_information_is_told_that_it_had_nothing_to_lose():
    found = series("cccc")
    empty = replace(found.looks[-1].watched, has_nothing_to_lose=True)
    found = replace(found, looks=(*found.looks[:-1], replace(found.looks[-1], watched=empty)))
    sentence = "MI was not clearly above 0 from the start: nothing to lose"
    (line,) = explanation(diagnosis(found))
    assert sentence in line.text and "Go back to a checkpoint" not in line.text
    assert f"no alarm: {sentence}" in [note.text for note in notes(diagnosis(found))]
    assert "no alarm" in [note.text for note in notes(diagnosis(series("hhhh")))]


def test_where_there_is_no_bootstrap_intervals_come_from_standard_errors():
    report = replace(
        REPORT, standard_errors={"mi_estimate": 0.1}, num_used_prompts=4, mi_estimate=0.5
    )
    found = interval_of(report, "mi_estimate")
    assert found is not None
    # Student's t with three degrees of freedom: 3.182 at 95 %.
    assert (found.low, found.high) == pytest.approx((0.5 - 0.3182, 0.5 + 0.3182), abs=1e-3)
    assert interval_of(report, "mi_upper_bound") is None
    # No estimate is beyond log N, so neither is their mean.
    near = replace(report, mi_upper_bound=0.6)
    assert interval_of(near, "mi_estimate") == replace(found, high=0.6)


def test_two_prompts_give_no_interval_of_what_compares_them_and_entropy_ends_at_zero():
    errors = {"mi_estimate": 1e-17, "retrieval_accuracy": 0.0, "conditional_entropy_est": 0.2}
    report = replace(
        REPORT, standard_errors=errors, num_used_prompts=2, conditional_entropy_est=0.5
    )
    assert interval_of(report, "mi_estimate") is None
    assert interval_of(report, "retrieval_accuracy") is None
    found = interval_of(report, "conditional_entropy_est")
    # Student's t with one degree of freedom: 12.706 at 95 %.
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.0, 0.5 + 0.2 * 12.706), abs=1e-3)
