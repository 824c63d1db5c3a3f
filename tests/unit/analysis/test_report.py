"""Reports: what stands in them, what damage does to them, and that a browser draws them."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from moored.analysis.figures import PALETTE
from moored.analysis.findings import Kind
from moored.analysis.report import Report, build_report
from moored.analysis.report_data import smoothed, thinned
from moored.analysis.stored import read_diagnosis
from moored.diagnostics.chain import Link
from moored.diagnostics.report import Interval
from moored.diagnostics.worth import Worth
from moored.errors import ConfigError, MooredError
from moored.runlog.log import RunLog
from moored.runlog.rollouts import write_groups

ROOT = Path(__file__).parents[3]
HOSTILE = "</script><script>alert('x')</script><img src=x onerror=y> & \"quoted\""
CURVES = ["success", "reward", "mi_estimate", "retrieval_accuracy", "conditional_entropy_est"]
CURVES += ["length", "validity", "filter", "variance", "time"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("report")


@pytest.fixture
def run(bench, tmp_path) -> Path:
    """Collapsed in its second half, with rollouts of steps 1, 10 and 20."""
    pytest.importorskip("pyarrow")
    return bench.make_run(
        tmp_path / "run", num_steps=20, look_every=4, rollouts_every=10, collapses=True
    )


def report_on(*runs: Path, **options) -> Report:
    return build_report(list(runs), command="moored report x", **options)


def page_of(report: Report) -> str:
    pytest.importorskip("plotly")
    from moored.analysis.report_page import render_report

    return render_report(report, made=datetime(2026, 1, 1, tzinfo=UTC))


def section(report: Report, title: str):
    return next(each for each in report.sections if each.title.startswith(title))


def test_the_headline_is_verdict_and_alarm_and_the_alarm_is_marked_in_every_curve(run):
    report = report_on(run)
    assert report.title == "Collapsed since step 12, alarm at step 12"
    assert report.kind is Kind.BAD
    drawn = section(report, "Over the steps").figures
    assert [figure.slug for figure in drawn] == CURVES
    for figure in drawn:
        shapes = figure.chart["layout"]["shapes"]
        assert [s["x0"] for s in shapes if "xref" not in s] == [12], figure.slug


def test_mi_is_shown_in_both_views_with_bands_from_their_standard_errors(run):
    report = report_on(run)
    assert "high MI says that reasoning depends" in page_of(report)
    chart = report.figures["mi_estimate"].chart
    bands = [trace for trace in chart["data"] if trace.get("fill")]
    assert [band["name"] for band in bands] == ["first turn", "observation swap"]
    line = next(
        trace for trace in chart["data"] if trace["name"] == "first turn" and trace != bands[0]
    )
    # t of 7 degrees of freedom is 2.365, the standard error 0.05.
    assert bands[0]["y"][0] - line["y"][0] == pytest.approx(2.365 * 0.05, abs=2e-4)


def log_worth(run: Path, *figures: tuple[float, float | None]) -> None:
    """Add correlations and their errors to the first looks of a run."""
    lines = (run / "collapse.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record, (correlation, error) in zip(records, figures, strict=False):
        worth = Worth(correlation=correlation, standard_error=error, num_prompts=1 + bool(error))
        record |= worth.metrics("collapse_first_turn_sample")
    (run / "collapse.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_what_dependence_earns_is_a_curve_where_it_was_measured(run):
    assert "worth" not in report_on(run).figures
    log_worth(run, (0.5, 0.01), (0.25, None))
    report = report_on(run)
    band, line = report.figures["worth"].chart["data"]
    # t of 1 degree of freedom is 12.706; one prompt tells nothing.
    assert line["x"] == [1, 4] and line["y"] == [0.5, 0.25]
    assert band["y"] == [0.6271, 1.0, -1.0, 0.3729]
    assert "depends more on their prompt earn more" in report.figures["worth"].caption
    (note,) = (note.text for note in report.notes if "earn more?" in note.text)
    assert "0.375 (mean of 2 looks, standard error 0.125), 0.250 at step 4 (1 prompt)" in note


def test_what_dependence_earns_is_compared_between_runs_within_what_it_can_be(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{seed}", seed=seed, num_steps=4, look_every=4)
        for seed in range(4)
    ]
    assert "worth" not in report_on(*runs).figures
    for run, correlation in zip(runs, (0.2, 0.9, 0.9, 0.9), strict=True):
        log_worth(run, (correlation, 0.1))
    band, line = report_on(*runs).figures["worth"].chart["data"]
    # 0.725 ± 3.182 · 0.35 / 2, but a correlation.
    assert line["y"] == [0.725] and band["y"] == [1.0, pytest.approx(0.1681, abs=1e-3)]


def log_chain(run: Path, *links: Link) -> None:
    """Add I(X;A) to the first looks of a run, and a bare I(Z;A|X), which says nothing of chance."""
    lines = (run / "collapse.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record, link in zip(records, links, strict=False):
        record |= link.metrics("collapse_chain/state_action_mi")
        record["collapse_chain/reasoning_action_mi"] = 2.0
    (run / "collapse.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_the_rest_of_the_chain_is_shown_with_interval_and_p_value_where_it_was_measured(run):
    assert "chain" not in report_on(run).figures
    first = Link(mi_nats=0.5, interval=Interval(0.25, 0.75), p_value=0.001)
    log_chain(run, first, Link(mi_nats=0.125, interval=Interval(-0.5, 0.75), p_value=0.25))
    report = report_on(run)
    band, line = report.figures["chain"].chart["data"]
    assert (line["name"], line["x"], line["y"]) == ("I(X;A)", [1, 4], [0.5, 0.125])
    assert band["y"] == [0.75, 0.75, -0.5, 0.25]
    (note,) = (note.text for note in report.notes if "do actions depend" in note.text)
    assert note.endswith("I(X;A) 0.125 nats at step 4 (95 % -0.500…0.750, p 0.250)")
    (series,) = read_diagnosis(run).series
    assert series.to_dict()["chain"] == {
        "state_action_mi": [
            {"step": 1, "mi_nats": 0.5, "interval": {"low": 0.25, "high": 0.75}, "p_value": 0.001},
            {"step": 4, "mi_nats": 0.125, "interval": {"low": -0.5, "high": 0.75}, "p_value": 0.25},
        ]
    }


def test_the_rest_of_the_chain_is_compared_between_runs(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{seed}", seed=seed, num_steps=4, look_every=4)
        for seed in (0, 1)
    ]
    for run, value in zip(runs, (0.2, 0.4), strict=True):
        log_chain(run, Link(mi_nats=value, p_value=0.5))
    drawn = report_on(*runs).figures["task_and_action"]
    assert drawn.chart["data"][-1]["y"] == [0.3]
    assert "reasoning_and_action" not in report_on(*runs).figures


def log_figures(run: Path, options: str, **figures: float | None) -> None:
    """Give every step of a run these figures, with __ for /, and the run these options."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = {name.replace("__", "/"): value for name, value in figures.items()}
    lines = [json.dumps(record | named) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "config.yaml").write_text(f"num_steps: 20\n{options}\n")


def test_mostly_outcome_free_updates_are_a_curve_a_warning_and_a_remedy(run):
    assert "outcome_free" not in report_on(run).figures
    log_figures(run, "algorithm: {name: grpo}", signal__outcome_free_share=0.7)
    report = report_on(run)
    chart = report.figures["outcome_free"].chart
    assert chart["data"][0]["y"] == [0.7] * 20
    assert [s["y0"] for s in chart["layout"]["shapes"] if s.get("xref")] == [0.5]
    (note,) = (note for note in report.notes if "outcome-free share" in note.text)
    assert note.kind is Kind.WARNING
    assert "of the first 10 steps 0.70" in note.text and "algorithm.advantage=dr_grpo" in note.text
    assert "or start again without division by the group's std" in report.meaning[0]
    # The run did not divide: a figure, and nothing to do about it.
    log_figures(run, "algorithm: {name: dr_grpo}", signal__outcome_free_share=0.7)
    report = report_on(run)
    (note,) = (note for note in report.notes if "outcome-free share" in note.text)
    assert note.kind is Kind.PLAIN and "dr_grpo" not in note.text + report.meaning[0]


def test_the_share_is_told_of_a_run_that_measured_no_collapse_too(run):
    (run / "collapse.jsonl").unlink()
    log_figures(run, "algorithm: {name: ppo, advantage: grpo}", signal__outcome_free_share=0.7)
    (note,) = (note for note in report_on(run).notes if "outcome-free share" in note.text)
    assert note.kind is Kind.WARNING


def test_the_share_of_several_runs_is_compared(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{seed}", seed=seed, num_steps=4, look_every=4)
        for seed in (0, 1)
    ]
    for seed, share in enumerate((0.2, 0.4)):
        log_figures(runs[seed], f"seed: {seed}", signal__outcome_free_share=share)
    *_, line = report_on(*runs).figures["outcome_free_share"].chart["data"]
    assert line["y"] == pytest.approx([0.3] * 4)


def test_episodes_that_were_lost_are_a_warning_where_a_run_has_any(run):
    assert not [note for note in report_on(run).notes if "error" in note.text]
    log_figures(run, "", **{"rollout/error_count": 2.0})
    (note,) = (note for note in report_on(run).notes if "error" in note.text)
    assert note.kind is Kind.WARNING and note.text.startswith("40 episodes ended in an error")


def test_success_that_has_not_moved_is_a_warning(run):
    assert not [note for note in report_on(run).notes if "progress" in note.text]
    log_figures(run, "", rollout__success_rate=0.0)
    (note,) = (note for note in report_on(run).notes if "progress" in note.text)
    # Parts of 3 of the 20 steps.
    assert note.kind is Kind.WARNING and note.text.startswith("No progress since step 3: ")


def test_a_malformed_reply_that_costs_less_than_a_well_formed_one_is_a_warning(run):
    name = "rollout__{}_turn_reward_mean"
    figures = {name.format("valid"): -0.2, name.format("malformed"): -0.1}
    log_figures(run, "", **figures)
    report = report_on(run)
    (note,) = (note for note in report.notes if note.text.startswith("A malformed reply costs"))
    assert "-0.100 against -0.200 a turn" in note.text and note.kind is Kind.WARNING
    lines = {line["name"]: line["y"] for line in report.figures["turns"].chart["data"]}
    assert lines == {"well-formed turns": [-0.2] * 20, "malformed turns": [-0.1] * 20}
    # Where it costs more, or none was malformed, there is nothing to say.
    for malformed in (-0.3, None):
        log_figures(run, "", **figures | {name.format("malformed"): malformed})
        assert not [n for n in report_on(run).notes if n.text.startswith("A malformed reply")]


def test_chance_names_its_view_where_views_compare_different_numbers_of_prompts(run):
    def notes() -> dict[str, float]:
        layout = report_on(run).figures["retrieval_accuracy"].chart["layout"]
        return {note["text"]: note["y"] for note in layout["annotations"]}

    assert notes() == {"chance": 0.125, "alarm": 1}
    records = [json.loads(line) for line in (run / "collapse.jsonl").read_text().splitlines()]
    for record in records:
        record["reports"]["observation_swap"]["num_prompts"] = 3
    (run / "collapse.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert notes() == {"chance, first turn": 0.125, "alarm": 1}


def test_rewards_are_mapped_early_in_the_middle_and_late_and_trajectories_shown(run):
    report = report_on(run)
    rewards = section(report, "Rewards")
    assert [figure.title for figure in rewards.figures] == [
        *("Early: step 1", "Middle: step 10", "Late: step 20"),
        "RV of all groups of 3 stored steps",
    ]
    kept, dropped = (sum(trace["y"]) for trace in rewards.figures[-1].chart["data"])
    assert (kept, dropped) == (9, 15)
    shown = section(report, "Trajectories").articles
    assert [each.title for each in shown] == [
        *("Succeeded", "Succeeded", "Failed", "Failed"),
        *("Dropped by the filter", "Dropped by the filter"),
    ]
    assert "#####\n#P" in shown[0].passages[0].seen and len(shown[0].passages) == 2


@pytest.mark.parametrize(("kind", "variance"), [("task", 0.0), ("total", 0.09), ("success", 0.25)])
def test_reward_variance_is_that_of_the_rewards_the_filter_goes_by(bench, tmp_path, kind, variance):
    pytest.importorskip("pyarrow")
    log = RunLog(tmp_path)
    log.write_config(f"filter: {{reward: {kind}}}\n")
    log.append("metrics", 1, {"rollout/success_rate": 0.0})
    # One episode played ten moves at -0.1; the other was malformed, fined 0.4, and played none.
    group = bench._group(0, 0.0, np.random.default_rng(0))
    played, lost = group.trajectories[:2]
    last = played.turns[-1]
    # Whether or not it counts as a success: with one, the outcomes are 1 and 0.
    played = replace(played, turns=(replace(last, reward=-1.0),), success=True)
    lost = replace(lost, turns=(replace(last, reward=-0.4, penalty=-0.4, is_valid=False),))
    groups = [replace(group, trajectories=(played, lost))]
    write_groups(log.rollouts_file(1), groups, step=1, kept=[True])
    rewards = section(report_on(tmp_path), "Rewards")
    assert rewards.figures[0].chart["data"][1]["z"] == [[pytest.approx(variance)]]
    assert ("penalties included" in rewards.text) == (kind == "total")
    assert ("RV is of the outcome" in rewards.text) == (kind == "success")


def test_scores_are_mapped_early_and_late_on_one_scale(run):
    figures = section(report_on(run), "Scores").figures
    assert [figure.title for figure in figures] == [
        *("Early: step 1, first turn", "Late: step 20, first turn"),
        *("Early: step 1, observation swap", "Late: step 20, observation swap"),
    ]
    early, late = (figure.chart["data"][0] for figure in figures[:2])
    assert early["zmax"] == late["zmax"] > 0.2
    # Collapsed: reasonings are hardly likelier under their own prompt.
    assert early["z"][0][0] > 0.2 > 0.01 > late["z"][0][0]


def test_a_run_with_one_look_has_one_map_and_one_without_scores_has_none(run):
    files = sorted((run / "scores").iterdir())
    for file in files[1:]:
        file.unlink()
    figures = section(report_on(run), "Scores").figures
    titles = ["Only look: step 1, first turn", "Only look: step 1, observation swap"]
    assert [figure.title for figure in figures] == titles
    files[0].unlink()
    assert not any(s.title.startswith("Scores") for s in report_on(run).sections)


def test_gradients_are_bars_where_they_were_measured(run):
    assert not any(s.title.startswith("Gradients") for s in report_on(run).sections)
    term = {"norm": 2.0, "snr": 1.5, "norm_interval": [1.0, 2.5]}
    buckets = [{"rv_low": 0.0, "rv_high": k, "terms": {"task": term, "kl": term}} for k in (1, 2)]
    line = json.dumps({"schema": 1, "step": 10, "buckets": buckets}) + "\n"
    (run / "gradients.jsonl").write_text(line + '{"step": 20, "buck')
    figures = section(report_on(run), "Gradients").figures
    assert [figure.title for figure in figures] == [
        *("Norm of the mean gradient, step 10", "Signal to noise, step 10")
    ]
    assert [trace["name"] for trace in figures[0].chart["data"]] == ["task", "kl"]
    assert figures[0].chart["data"][0]["error_y"]["arrayminus"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("collapse.jsonl", "not JSON\n", "collapse.jsonl', line 1 is not JSON"),
        ("timing.jsonl", "{}\n", "timing.jsonl', line 1 has schema None"),
        ("config.yaml", "a: [", "config.yaml' is not valid YAML"),
        ("gradients.jsonl", '{"schema": 1, "step": 4}\n', "has no buckets at step 4"),
        ("rollouts/step_000020.parquet", "torn", "cannot read"),
        ("scores/step_000001.npz", "torn", "scores/step_000001.npz': "),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_is_shown(run, file, text, said):
    (run / file).write_text(text)
    report = report_on(run)
    assert any(said in note.text and note.kind is Kind.WARNING for note in report.notes)
    assert "success" in report.figures


def test_an_alarm_of_another_version_is_named_and_the_rest_is_shown(run):
    text = (run / "collapse.jsonl").read_text().replace('"mi_level_se": 0.05, ', "")
    (run / "collapse.jsonl").write_text(text)
    report = report_on(run)
    assert any("has no 'mi_level_se': another version" in note.text for note in report.notes)
    assert "success" in report.figures


def test_every_start_of_a_run_is_shown_with_its_command_versions_and_machine(run):
    log = RunLog(run, resume=True)
    about = {
        "command": ["moored", "train", "--resume", "my run"],
        "versions": {"moored": "0.2.0", "torch": "2.13.0"},
        "engine": "1.2 M parameters, cpu, float32",
        "machine": {"cpu": "EPYC", "cores": 2},
    }
    log.append("starts", 10, about)
    assert section(report_on(run), "Command and versions").block == (
        "started\nmoored train x\nnumpy 2.0\n\n"
        "resumed after step 10\nmoored train --resume 'my run'\nmoored 0.2.0, torch 2.13.0\n"
        "1.2 M parameters, cpu, float32\ncpu EPYC, cores 2"
    )


def test_a_run_in_progress_is_shown_as_far_as_it_went(run):
    with (run / "metrics.jsonl").open("r+") as file:
        lines = file.readlines()
        file.seek(0)
        file.truncate()
        file.writelines([*lines[:15], lines[15][:40]])
    report = report_on(run)
    assert report.notes[0].text == "The run is not complete: 15 of 20 steps are finished."
    assert report.figures["success"].chart["data"][0]["x"] == list(range(1, 16))


def test_an_option_that_was_changed_midway_is_a_warning_on_the_page(run):
    changes = {"optimizer.lr": {"old": 0.1, "new": 0.2}, "num_steps": {"old": 10, "new": 20}}
    record = {"schema": 1, "step": 10, "options": changes}
    (run / "changes.jsonl").write_text(json.dumps(record) + "\n")
    texts = [note.text for note in report_on(run).notes if note.kind is Kind.WARNING]
    said = "optimizer.lr was changed from 0.1 to 0.2 when the run was resumed after step 10."
    assert texts == [said]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("rule: top_k\n  value: 0.5\n  largest: false", "top_k 0.5, lowest first"),
        ("rule: nonzero\n  value: 0.9\n  largest: true", "nonzero"),
        ("rule: none\n  best_and_worst: 4", "none, 4 best and 4 worst trajectories of a group"),
    ],
)
def test_the_filter_is_named_with_what_it_keeps(run, options, shown):
    (run / "config.yaml").write_text(f"num_steps: 20\nfilter:\n  {options}\n")
    assert report_on(run).facts["filter"] == shown


def test_broken_and_empty_runs_are_named_and_the_others_compared(bench, tmp_path):
    runs = [bench.make_run(tmp_path / name, seed=k, num_steps=8) for k, name in enumerate("ab")]
    empty, broken, bare = (tmp_path / name for name in ("empty", "broken", "bare"))
    for folder in (empty, broken, bare):
        folder.mkdir()
    (empty / "config.yaml").write_text("seed: 0\n")
    (broken / "metrics.jsonl").write_text("[1]\n")
    (bare / "metrics.jsonl").write_text('{"schema": 1}\n')
    report = report_on(*runs, empty, broken, bare)
    assert list(report.left_out) == [str(broken), str(bare), str(empty)]
    assert report.title == "2 runs of 1 setting" and "success" in report.figures
    page = page_of(report)
    assert all(f"Left out: {folder}" in page for folder in (empty, broken, bare))
    assert report_on(empty, broken).title == "None of the 2 runs can be shown"
    assert report_on(empty).title == "The run cannot be shown"
    assert report_on(runs[0], empty).title == "Healthy"
    with pytest.raises(ConfigError, match="there is no folder"):
        report_on(tmp_path / "nowhere")


def test_seeds_become_a_mean_and_the_interval_of_the_mean(tmp_path):
    rates = ([0.2, 0.4], [0.4, 0.4, 0.9], [0.2, 0.4], [0.4, 0.4])
    runs = [
        write_run(tmp_path / str(k), k, success_rate=r, reward_mean=r) for k, r in enumerate(rates)
    ]
    few = report_on(*runs[:2])
    *seeds, line = few.figures["success"].chart["data"]
    # The curve ends with the shorter run; the interval of two seeds is wider than the figure.
    assert line["x"] == [1, 2] and line["y"] == [0.3, 0.4] and "fill" not in seeds[0]
    assert [seed["y"] for seed in seeds] == [[0.2, 0.4], [0.4, 0.4, 0.9]]
    assert "thin lines are single seeds" in section(few, "Over the steps").text
    cut = report_on(*runs[:2], until=1).figures["success"].chart["data"][-1]
    assert cut["x"] == [1]
    many = report_on(*runs)
    band, line = many.figures["reward"].chart["data"]
    # t = 3.182 with four seeds, standard error 0.1155 / 2.
    assert band["y"] == pytest.approx([0.4837, 0.4, 0.4, 0.1163], abs=1e-4)
    assert band["opacity"] < 0.2 and "bands" in section(many, "Over the steps").text


def write_run(folder: Path, seed: int, **curves: list[float]) -> Path:
    """A run directory with these keys of its metrics, one value for each step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {seed}\n")
    steps = zip(*curves.values(), strict=True)
    records = [
        {"schema": 1, "step": step, **dict(zip((f"rollout/{k}" for k in curves), row, strict=True))}
        for step, row in enumerate(steps, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_where_bands_are_wide_the_axis_follows_the_means_and_the_figure_says_how_far_they_reach(
    tmp_path,
):
    tokens = [[34.0, 3.0], [34.0, 90.0], [34.0, 2.0], [34.0, 42.0]]
    runs = [
        write_run(tmp_path / str(k), k, success_rate=[0.2, 0.2], reply_tokens_mean=each)
        for k, each in enumerate(tokens)
    ]
    report = report_on(*runs)
    # Step 2: 34.25 ± 3.182 · 41.5 / 2. Lengths are not negative.
    (note,) = report.figures["reply_tokens"].chart["layout"]["annotations"]
    assert note["text"] == "bands reach from 0 to 100"
    low, high = report.figures["reply_tokens"].chart["layout"]["yaxis"]["range"]
    assert 15 < low < 34 and 35 < high < 55
    assert "annotations" not in report.figures["success"].chart["layout"]
    assert "cut at the edge" in section(report, "Over the steps").text
    assert "cut at the edge" not in section(report_on(*runs[:2]), "Over the steps").text


def test_bands_that_would_hide_each_other_are_left_out_and_the_page_says_so(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{value}-{seed}", seed=seed, value=value, num_steps=3)
        for value in (0.1, 0.2, 0.3, 0.4, 0.5)
        for seed in range(4)
    ]
    report = report_on(*runs)
    assert len(report.figures["success"].chart["data"]) == 5
    assert "the table has the intervals" in section(report, "Over the steps").text
    assert len(report_on(*runs[:16]).figures["success"].chart["data"]) == 4 + 4


def test_every_setting_is_named_once_in_every_figure_and_keeps_its_colour(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{value}-{seed}", seed=seed, value=value, num_steps=6)
        for value in (0.5, 0.9)
        for seed in (0, 1)
    ]
    (runs[0] / "timing.jsonl").unlink()
    (runs[1] / "timing.jsonl").unlink()
    figures = report_on(*runs).figures
    colors = {"A: value 0.5": PALETTE[0], "B: value 0.9": PALETTE[1]}
    for slug, drawn in figures.items():
        named = [trace for trace in drawn.chart["data"] if trace.get("showlegend", True)]
        found = {trace["name"]: trace["line"]["color"] for trace in named}
        assert len(found) == len(named)
        assert found == ({"B: value 0.9": PALETTE[1]} if slug == "seconds" else colors)
        assert drawn.chart["layout"]["showlegend"]


def test_settings_are_named_by_the_options_in_which_they_differ(bench, tmp_path):
    runs = [
        bench.make_run(tmp_path / f"{value}_{seed}", seed=seed, value=value, num_steps=8)
        for value in (0.5, 0.9)
        for seed in (0, 1)
    ]
    report = report_on(*runs)
    assert report.title == "4 runs of 2 settings"
    assert report.facts["settings"] == "A: value 0.5 (2 seeds); B: value 0.9 (2 seeds)"
    (options,) = section(report, "Options").grids.values()
    assert options.rows == (("filter.value", "0.5", "0.9"),)
    (ends,) = section(report, "Start and end").grids.values()
    (listed,) = section(report, "Runs").grids.values()
    assert "±" in ends.rows[0][2] and len(listed.rows) == 4


def test_the_page_loads_nothing_holds_plotly_once_and_escapes_what_models_wrote(bench, tmp_path):
    pytest.importorskip("pyarrow")
    run = bench.make_run(tmp_path / "run", num_steps=3, rollouts_every=1)
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"# {HOSTILE}\n")
    page = page_of(report_on(run))
    assert HOSTILE not in page and "&lt;/script&gt;&lt;script&gt;alert" in page
    assert page.count("plotly.js v") == 1
    assert page.count("<script") == 3 + page.count('"<script')
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith(
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:;"
    )
    assert policy[1].count("sha256-") == 2
    assert "moored report x" in page and "plotly " in page


def test_forty_runs_of_four_hundred_steps_stay_under_fifteen_megabytes(bench, tmp_path):
    runs = bench.make_runs(tmp_path, runs=40, steps=400, seeds=1)
    report = report_on(*runs)
    page = page_of(report)
    assert report.title == "40 runs"
    assert len(report.figures["success"].chart["data"]) == 40
    assert len(page.encode()) < 15e6


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_without_network_draws_every_figure_and_complains_about_nothing(
    run, tmp_path, width
):
    browser = shutil.which("chromium") or pytest.skip("needs chromium")
    report = report_on(run)
    file = tmp_path / "report.html"
    file.write_text(page_of(report))
    from moored.analysis.report_page import FLAGS

    words = [
        browser,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
    ]
    words += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]
    words += ["--virtual-time-budget=20000", "--dump-dom", file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count('class="plot js-plotly-plot"') == len(report.figures) == 19
    assert len(re.findall(r'<svg class="main-svg"', done.stdout)) >= 15


def test_every_figure_becomes_a_picture(run, tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    from moored.analysis.report_page import write_pictures

    pytest.importorskip("plotly")
    report = report_on(run)
    pictures = write_pictures(tmp_path / "png", report.figures)
    assert len(pictures) == 19
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


def test_without_a_browser_one_sentence_says_what_to_install(monkeypatch):
    from moored.analysis.report_page import find_browser

    monkeypatch.setenv("PATH", "")
    with pytest.raises(MooredError, match=r"needs Chromium or Chrome.*apt-get install chromium"):
        find_browser()


def test_long_curves_become_means_of_neighbours():
    assert thinned([1, 2, 3, 4, 5], [0.0, 2.0, 4.0, 6.0, 9.0], most=3) == (
        [1, 3, 5],
        [1.0, 5.0, 9.0],
    )
    assert thinned([1, 2], [0.0, 2.0], most=3) == ([1, 2], [0.0, 2.0])


def test_a_running_mean_takes_fewer_neighbours_at_the_ends():
    assert smoothed([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([1.0, 5.0], 1) == [1.0, 5.0]


def test_a_mean_over_an_even_number_of_steps_is_over_that_many():
    assert smoothed([0.0, 4.0, 8.0, 0.0], 2) == [0.0, 2.0, 6.0, 4.0]
    assert smoothed([4.0, 0.0, 0.0, 0.0, 0.0], 4)[2] == 1.0
