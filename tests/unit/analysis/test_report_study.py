"""The report on the folder of a study: what it declares, its table, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.analysis.figures import PALETTE
from moored.analysis.report import Report, build_report
from moored.runlog.log import RunLog


def write_run(folder: Path, success: float) -> None:
    log = RunLog(folder)
    log.write_config("seed: 0\n")
    for step in (1, 2):
        log.append("metrics", step, {"rollout/success_rate": success})


@pytest.fixture
def study(tmp_path) -> Path:
    """Two arms, two seeds; one run failed, and of a third seed nothing has begun."""
    write_run(tmp_path / "ppo/none/seed-0", 0.1)
    write_run(tmp_path / "ppo/none/seed-1", 0.3)
    write_run(tmp_path / "ppo/top_p/seed-0", 0.5)
    write_run(tmp_path / "ppo/top_p/seed-1", 0.9)
    declared = {
        "study": "mine",
        "question": "Does it help?",
        "paper": "Success 12.1 % (+9.0).",
        "base": ["collapse"],
        "overrides": ["num_steps=2"],
        "factors": {
            "algorithm": {"ppo": ["ppo"]},
            "filter": {"none": ["filter.rule=none"], "top_p": []},
        },
        "seeds": [0, 1, 2],
        "report": ["success", "seconds a step"],
        "against": ["filter", "none"],
    }
    (tmp_path / "study.json").write_text(json.dumps(declared))
    ended = {"ppo/top_p/seed-1": {"status": "failed", "exit_code": 3, "seconds": 1.0}}
    (tmp_path / "progress.json").write_text(json.dumps({"runs": ended}))
    return tmp_path


def section(report: Report, title: str):
    return next(each for each in report.sections if each.title == title)


def test_the_headline_is_the_question_and_what_the_paper_found(study):
    report = build_report([study], command="x")
    assert report.title == "mine: 3 of 6 runs, 2 arms"
    assert report.meaning == ("Does it help?",)
    assert report.facts == {"the paper": "Success 12.1 % (+9.0)."}
    ((path, why),) = report.left_out.items()
    assert path.endswith("ppo/top_p/seed-1") and "exit code 3" in why


def test_table_and_differences_are_those_of_the_study(study):
    result = section(build_report([study], command="x"), "Result")
    table, differences = result.grids.values()
    assert table.header[:3] == ("algorithm", "filter", "success")
    # t = 12.706 with two seeds, standard error 0.1.
    assert [row[1:3] for row in table.rows] == [("none", "0.200 ± 1.271"), ("top_p", "0.500")]
    assert differences.rows == (("ppo", "top_p", "+0.400"),)
    assert "over the last step" in result.text


def test_every_figure_of_the_table_is_drawn_with_seeds_mean_and_interval(study):
    report = build_report([study], command="x")
    (drawn,) = section(report, "Result by arm").figures  # the runs have no seconds
    mean, seeds, *_ = drawn.chart["data"]
    assert mean["y"] == ["ppo none"] and mean["x"] == [0.2]
    # 0.2 ± 1.271, but a share.
    assert (mean["error_x"]["array"], mean["error_x"]["arrayminus"]) == ([0.8], [0.2])
    assert seeds["x"] == [0.1, 0.3] and seeds["text"] == ["seed 0", "seed 1"]
    assert drawn.chart["layout"]["xaxis"]["range"][0] > -0.1
    colors = {trace["name"]: trace["marker"]["color"] for trace in drawn.chart["data"]}
    lines = {t["name"]: t["line"]["color"] for t in report.figures["success"].chart["data"]}
    assert colors == lines == {"ppo none": PALETTE[0], "ppo top_p": PALETTE[1]}


def test_the_options_of_all_arms_are_listed(study):
    (options,) = section(build_report([study], command="x"), "Arms").grids.values()
    assert options.rows == (
        ("", "every run", "collapse num_steps=2"),
        ("algorithm", "ppo", "ppo"),
        ("filter", "none", "filter.rule=none"),
        ("filter", "top_p", ""),
    )


def test_a_study_without_a_run_has_no_page(study):
    (study / "study.json").write_text(
        (study / "study.json").read_text().replace("[0, 1, 2]", "[7]")
    )
    report = build_report([study], command="x")
    assert not report.sections and report.left_out
