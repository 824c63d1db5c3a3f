"""What training measured, read back: runs whose looks say nothing, and why."""

from __future__ import annotations

import pytest

from moored.analysis.stored import has_looks, read_diagnosis, why_no_looks
from moored.diagnostics.information import information
from moored.errors import MooredError
from moored.runlog.log import RunLog


def make_run(folder, *looks) -> None:
    log = RunLog(folder)
    log.write_config("num_steps: 1\n")
    log.append("starts", 0, {})
    for step, (reports, skipped) in enumerate(looks, start=1):
        look = {"view": None, "alarm": None, "share_unmeasured": 0.0}
        record = {"environments": {"toy": look}, "reports": reports, "skipped": skipped}
        log.append("collapse", step, record)


def test_a_run_without_looks_says_whether_none_was_asked_for_or_none_could_be_made(tmp_path):
    make_run(tmp_path / "off")
    assert why_no_looks(tmp_path / "off") == "training measured nothing (collapse.every=0)"
    make_run(tmp_path / "empty", *[({}, {"first_turn": "no reply has tags"})] * 2)
    assert not has_looks(tmp_path / "empty")
    assert why_no_looks(tmp_path / "empty") == (
        "training could measure none of its 2 looks (no reply has tags)"
    )


def test_a_warm_start_is_not_told_to_use_options_that_it_does_not_have(tmp_path):
    log = RunLog(tmp_path / "run")
    log.write_config("command: sft\nmodel: nano\n")
    with pytest.raises(MooredError) as caught:
        why_no_looks(log.path)
    said = str(caught.value)
    assert "is a warm start" in said and f"`moored report {log.path}`" in said
    assert f"`moored eval {log.path}/model`" in said
    assert "collapse.every" not in said and "log.rollouts_every" not in said


def test_looks_at_single_turns_alone_are_not_blamed_on_the_replies(tmp_path):
    report = information([[-1.0, -2.0], [-2.0, -1.0]], [0, 1], [1, 1], permutations=0)
    make_run(tmp_path / "run", ({"turn_1": report.to_dict()}, {"turn_2": "too few"}))
    assert has_looks(tmp_path / "run")
    with pytest.raises(MooredError, match=r"verdict: collapse\.views has none of episode_swap"):
        read_diagnosis(tmp_path / "run")
