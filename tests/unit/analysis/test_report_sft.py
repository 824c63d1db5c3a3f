"""Reports on warm starts: the loss is drawn, and a step is as long as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from moored.analysis.compare import compare_runs
from moored.analysis.report import build_report
from moored.analysis.report_page import render_report
from moored.runlog.log import RunLog

CONFIG = "command: sft\nseed: {seed}\nnum_steps: 2\nmodel: nano\nenv: []\n"


def write_run(folder: Path, *, seed: int = 0) -> Path:
    """Two steps; the second is measured, which takes half of its second."""
    log = RunLog(folder)
    log.write_config(CONFIG.format(seed=seed))
    log.append("metrics", 0, {"evaluation/loss": 3.0})
    log.append("metrics", 1, {"train/loss": 2.0})
    log.append("metrics", 2, {"train/loss": 1.0, "evaluation/loss": 1.5})
    log.append("timing", 1, {"dialogues_s": 0.1, "update_s": 0.2, "step_s": 0.3})
    log.append("timing", 2, {"dialogues_s": 0.1, "update_s": 0.4, "step_s": 1.0})
    return folder


def test_the_phases_of_a_step_add_up_to_its_time(tmp_path):
    figures = build_report([write_run(tmp_path / "a")], command="").figures
    phases = {trace["name"]: trace["y"] for trace in figures["time"].chart["data"]}
    assert list(phases) == ["dialogues", "update", "the rest"]
    assert phases["the rest"] == pytest.approx([0.0, 0.5])
    assert [sum(parts) for parts in zip(*phases.values(), strict=True)] == pytest.approx([0.3, 1.0])


def test_the_report_of_a_warm_start_shows_both_losses_and_says_that_it_is_one(tmp_path):
    report = build_report([write_run(tmp_path / "a")], command="")
    assert report.title == ("Warm start, which has no verdict")
    assert "high MI" not in render_report(report, made=datetime(2026, 1, 1, tzinfo=UTC))
    traces = report.figures["loss"].chart["data"]
    drawn = {trace["name"]: (trace["x"], trace["y"]) for trace in traces}
    assert drawn == {"training loss": ([1, 2], [2.0, 1.0]), "held-out loss": ([0, 2], [3.0, 1.5])}


def test_warm_starts_are_compared_by_loss_and_by_the_time_of_a_step(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    figures = build_report(runs, command="").figures
    means = {
        slug: figures[slug].chart["data"][-1]["y"] for slug in ("training_loss", "held_out_loss")
    }
    assert means == {"training_loss": [2.0, 1.0], "held_out_loss": [3.0, 1.5]}
    assert figures["seconds"].chart["data"][-1]["y"] == pytest.approx([0.3, 1.0])
    (arm,) = compare_runs(runs).arms
    ends = {name: (figure.start, figure.end) for name, figure in arm.figures().items()}
    # The first record is the measurement before the first step, which has no training loss.
    assert ends["training loss"] == (None, 1.0)
    assert ends["held-out loss"] == (3.0, 1.5)


def test_an_option_that_was_empty_is_named_as_it_is_written(tmp_path):
    run = write_run(tmp_path / "a")
    with open(run / "changes.jsonl", "w") as file:
        file.write('{"schema": 1, "step": 1, "options": {"workers": {"old": null, "new": 1}}}\n')
    (note,) = (n.text for n in build_report([run], command="").notes if "workers" in n.text)
    assert note.startswith("workers was changed from null to 1 when")
