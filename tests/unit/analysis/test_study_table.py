"""The table of a study, from run directories with numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moored.analysis.study_table import (
    has_collapsed,
    peak,
    read_result,
    read_table,
    table_lines,
    table_notes,
    to_dict,
    to_markdown,
)
from moored.runlog.log import RunLog


def write_run(path: Path, success: list[float], *, seconds: float = 1.0, alarm: bool = False):
    log = RunLog(path)
    log.write_config("seed: 0\n")
    for step, value in enumerate(success, start=1):
        log.append("metrics", step, {"rollout/success_rate": value, "tokens/trained": 10.0 * step})
        rollout_s = 9.0 if step == 1 else seconds
        timing = {"rollout_s": rollout_s, "filter_s": 0.25, "update_s": 0.25}
        log.append("timing", step, timing)
    report = {"mi_estimate": 0.25, "conditional_entropy_est": 2.0}
    log.append(
        "collapse",
        len(success),
        {
            "environments": {"sokoban": {"view": "v"}},
            "reports": {"v": report},
            "verdict": "cannot_tell",
            "alarm": {"kind": "x"} if alarm else None,
        },
    )


def test_times_leave_out_the_first_step_and_sum_the_phases(tmp_path):
    write_run(tmp_path / "a", [0.0, 0.5, 1.0], seconds=2.0)
    figures = read_result(tmp_path / "a", 0).figures
    assert figures["seconds: rollout"] == 2.0
    assert figures["seconds a step"] == 2.5
    assert figures["filter, % of a step"] == 10.0
    assert figures["tokens trained"] == 25.0
    assert figures["success"] == 1.0  # the last third of three steps
    assert (figures["MI"], figures["H(Z|X)"]) == (0.25, 2.0)


def test_peak_is_the_best_mean_of_ten_steps_in_a_row():
    assert peak([0.0] * 5 + [1.0] * 5 + [0.0] * 20) == 0.5
    assert peak([0.2, 0.4]) == pytest.approx(0.3)


@pytest.fixture
def table(tmp_path):
    """Two arms, two seeds; the second seed of both is better by 0.2."""
    write_run(tmp_path / "none-0", [0.1, 0.1])
    write_run(tmp_path / "none-1", [0.3, 0.3], alarm=True)
    write_run(tmp_path / "top-0", [0.2, 0.2])
    write_run(tmp_path / "top-1", [0.4, 0.4])
    runs = {
        ("none",): {0: tmp_path / "none-0", 1: tmp_path / "none-1", 2: tmp_path / "gone"},
        ("top",): {0: tmp_path / "top-0", 1: tmp_path / "top-1"},
    }
    names = ["success", "MI"]
    return read_table(runs, factors=["filter"], figures=names, against=("filter", "none"))


def test_means_have_intervals_over_seeds_and_differences_are_taken_seed_by_seed(table):
    none, top = table.rows
    # Student's t with one degree of freedom: 12.706 · 0.1414 / √2.
    assert none.figures["success"].mean == pytest.approx(0.2)
    assert none.figures["success"].half_width == pytest.approx(1.2706)
    assert not none.differences
    assert top.differences["success"].mean == pytest.approx(0.1)
    assert top.differences["success"].half_width == pytest.approx(0.0, abs=1e-9)
    assert none.alarm_steps == [None, 2]
    assert next(iter(table.left_out)).endswith("gone")


def test_the_table_is_written_as_markdown_and_json(table):
    assert to_markdown(table) == (
        "| filter | success | MI | collapsed | verdict | alarms | runs |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| none | 0.200 ± 1.271 | 0.250 ± 0.000 | 0 of 2 [0.00, 0.66] | 2 cannot tell | 1 of 2 "
        "| 2 |\n"
        "| top | 0.300 ± 1.271 | 0.250 ± 0.000 | 0 of 2 [0.00, 0.66] | 2 cannot tell | 0 of 2 "
        "| 2 |\n"
        "\nDifferences from filter none, seed by seed:\n\n"
        "| filter | success | MI |\n| --- | --- | --- |\n"
        "| top | +0.100 ± 0.000 | +0.000 ± 0.000 |\n"
        "\nMeans over seeds; ± is half of the 95 % interval (Student's t). Success, reward and "
        "collapse are means over the last step of each run.\n"
        "\nCollapsed: MI of the last 4 looks is on average below a third of its highest; brackets "
        "are 95 % Wilson intervals.\n"
    )
    rows = to_dict(table)["rows"]
    assert isinstance(rows, list)
    assert rows[1]["arms"] == {"filter": "top"}
    assert rows[1]["runs"][0]["verdict"] == "cannot tell"


def test_an_arm_without_a_run_has_a_row_of_dashes(tmp_path):
    write_run(tmp_path / "a", [0.1, 0.1])
    runs = {("a",): {0: tmp_path / "a"}, ("b",): {}}
    table = read_table(runs, factors=["x"], figures=["success"])
    assert table_lines(table)[2] == ["b", "–", "–", "–", "0 of 0", "0"]


def test_the_table_says_over_how_many_steps_it_averages_and_where_runs_end(tmp_path):
    write_run(tmp_path / "a", [0.1] * 30)
    write_run(tmp_path / "b", [0.1] * 12)
    runs = {("a",): {0: tmp_path / "a"}, ("b",): {0: tmp_path / "b"}}
    first, _, last = table_notes(read_table(runs, factors=["x"]))
    # Half of 12 steps, and 10 of 30.
    assert first.endswith("are means over the last 6 to 10 steps of each run.")
    assert last == "The runs end at different steps, from 12 to 30."
    alone = read_table({("a",): {0: tmp_path / "a"}}, factors=["x"])
    assert len(table_notes(alone)) == 2 and "last 10 steps" in table_notes(alone)[0]
    assert table_notes(read_table({("a",): {}}, factors=["x"])) == []


def test_a_step_of_errors_is_no_step_without_success(tmp_path):
    write_run(tmp_path / "a", [0.5, math.nan, 0.7])
    assert read_result(tmp_path / "a", 0).figures["peak success"] == pytest.approx(0.6)
    log = RunLog(tmp_path / "sft")
    log.write_config("seed: 0\n")
    log.append("metrics", 1, {"train/loss": 0.5})
    assert "peak success" not in read_result(tmp_path / "sft", 0).figures


def test_a_run_of_two_environments_has_a_column_of_mi_for_each(tmp_path):
    log = RunLog(tmp_path / "a")
    log.write_config("seed: 0\n")
    log.append("metrics", 1, {"rollout/success_rate": 0.5})
    views = {"maze": {"view": "maze/first_turn"}, "sums": {"view": "sums/first_turn"}}
    reports = {"maze/first_turn": {"mi_estimate": 0.5}, "sums/first_turn": {"mi_estimate": 1.5}}
    log.append("collapse", 1, {"environments": views, "reports": reports, "verdict": "healthy"})
    table = read_table({("a",): {0: tmp_path / "a"}}, factors=["x"], figures=["success", "MI"])
    header, row = table_lines(table)
    assert header[1:4] == ["success", "MI, maze", "MI, sums"]
    assert row[1:4] == ["0.500", "0.500", "1.500"]


def test_a_run_has_collapsed_when_its_last_four_looks_are_below_a_third_of_its_best():
    assert has_collapsed([0.9, 0.2, 0.3, 0.3, 0.3])  # 0.275 on average, of 0.9
    assert not has_collapsed([0.9, 0.6, 0.2, 0.3, 0.3])  # 0.35
    assert not has_collapsed([0.4])


def write_looks(path: Path, mi: dict[str, list[float]], shares: list[float]) -> None:
    """A run with a look in each step; MI by environment."""
    log = RunLog(path)
    log.write_config("seed: 0\n")
    for step, share in enumerate(shares, start=1):
        metrics = {"rollout/success_rate": 0.1, "signal/outcome_free_share": share}
        log.append("metrics", step, metrics)
        log.append(
            "collapse",
            step,
            {
                "environments": {name: {"view": name} for name in mi},
                "reports": {name: {"mi_estimate": values[step - 1]} for name, values in mi.items()},
                "verdict": "healthy",
            },
        )


def test_collapsed_runs_are_counted_with_an_interval_whatever_the_last_verdict(tmp_path):
    held, lost = [0.4] * 12, [0.6] * 8 + [0.1] * 4
    write_looks(tmp_path / "a", {"maze": held}, [0.5] * 10 + [0.0] * 2)
    write_looks(tmp_path / "b", {"maze": held, "sums": lost}, [0.25] * 4 + [math.nan] * 8)
    runs = {("x",): {0: tmp_path / "a", 1: tmp_path / "b"}}
    figures = ["success", "outcome-free share"]
    table = read_table(runs, factors=["arm"], figures=figures)
    header, row = table_lines(table)
    # Wilson's interval of 1 in 2: 0.5 ± 1.96 · √(2 · 0.25 + 1.96² / 4) / (2 + 1.96²).
    assert row[header.index("collapsed")] == "1 of 2 [0.09, 0.91]"
    # Over the first ten steps, those without an update left out.
    assert table.rows[0].figures["outcome-free share"].by_seed == {0: 0.5, 1: 0.25}
    assert [run.has_collapsed for run in table.rows[0].runs] == [False, True]
    assert "a third of its highest; brackets are 95 % Wilson" in to_markdown(table)
