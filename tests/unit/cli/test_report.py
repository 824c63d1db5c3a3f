"""`moored report` and the end of `moored train`: files, exit codes, sentences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.cli.report import write_or_explain


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\nnum_steps: 2\n")
    records = [{"schema": 1, "step": k, "rollout/success_rate": 0.5} for k in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def report(monkeypatch):
    def command(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["moored", "report", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    return command


def test_the_page_lies_in_the_run_unless_told_otherwise(run, report, tmp_path, capsys):
    pytest.importorskip("plotly")
    assert report(run) == 0
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    assert report(run, "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").is_file()
    assert f"moored report {run}" in (run / "report.html").read_text()


def test_a_run_that_cannot_be_read_is_on_the_page_and_the_exit_code_is_1(
    run, report, tmp_path, capsys
):
    pytest.importorskip("plotly")
    (tmp_path / "empty").mkdir()
    assert report(run, tmp_path / "empty", "-o", tmp_path / "page.html") == 1
    said = f"left out: {tmp_path / 'empty'}: "
    assert capsys.readouterr().err.startswith(said)
    assert f"Left out: {tmp_path / 'empty'}: " in (tmp_path / "page.html").read_text()


def test_files_that_a_glob_names_beside_runs_are_passed_over(run, report, tmp_path, capsys):
    pytest.importorskip("plotly")
    log = run.with_name("one.log")
    log.write_text("step 1\n")
    run.with_name("two.log").write_text("step 1\n")
    assert report(*sorted(run.parent.glob("*")), "-o", tmp_path / "page.html") == 0
    out, err = capsys.readouterr()
    assert err == f"passed over, as no run directory: {log} and 1 more\n" and "report: " in out
    # Alone, or far from every run, a file is a mistake.
    assert report(log) == 2
    assert f"no folder {str(log)!r}" in capsys.readouterr().err
    (tmp_path / "far.txt").write_text("")
    assert report(run, tmp_path / "far.txt") == 2


def test_the_folder_of_a_study_becomes_one_page_of_its_arms(run, report, tmp_path, capsys):
    pytest.importorskip("plotly")
    study = tmp_path / "study"
    (study / "none").mkdir(parents=True)
    run.rename(study / "none" / "seed-0")
    declared = {"study": "mine", "question": "Why?", "paper": "12 %", "base": ["smoke"]}
    declared |= {"factors": {"filter": {"none": []}}, "seeds": [0, 1], "overrides": []}
    (study / "study.json").write_text(json.dumps(declared))
    assert report(study) == 0
    assert capsys.readouterr().out == (
        f"mine: 1 of 2 runs, 1 arm\nreport: {study / 'report.html'}\n"
    )
    assert report(study, "--until", "1") == 2
    (study / "study.json").write_text('{"study": "correlation"}')
    assert report(study) == 2
    assert "is an analysis" in capsys.readouterr().err


def test_a_folder_of_runs_that_is_no_study_is_refused_and_its_page_stays(
    run, report, tmp_path, capsys
):
    pytest.importorskip("plotly")
    study = tmp_path / "runs"
    (study / "report.html").write_text("all runs of the study")
    assert report(study) == 2
    said = f"moored: {str(study)!r} is not a run but holds runs; give those, such as {str(run)!r}\n"
    assert capsys.readouterr().err == said
    assert (study / "report.html").read_text() == "all runs of the study"


def test_a_page_stays_as_it_was_when_its_run_can_no_longer_be_read(run, report, capsys):
    pytest.importorskip("plotly")
    (run / "report.html").write_text("before")
    (run / "metrics.jsonl").write_text("[1]\n")
    assert report(run) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    write_or_explain([run], run / "report.html", "moored report x")
    assert capsys.readouterr().out.startswith("no report: ")
    assert (run / "report.html").read_text() == "before"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "-o", "x.html"], "there is no folder 'nowhere'; give run directories"),
        (["nowhere"], "there is no folder 'nowhere'; give run directories"),
        ([".", "-o", "."], "-o needs a file, got the folder '.'"),
        ([".", "--until", "3"], "--until is for comparing several runs"),
    ],
)
def test_mistakes_are_one_line(report, words, said, tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    assert report(*words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_plotly_report_and_train_say_how_to_get_it(run, report, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = (
        "a report needs packages that are not installed (plotly); run: pip install 'moored[report]'"
    )
    assert report(run) == 2
    assert said in capsys.readouterr().err
    write_or_explain([run], run / "report.html", "moored report x")
    assert capsys.readouterr().out == f"no report: {said}\n"


def test_the_page_of_diagnose_needs_plotly_before_any_file_is_read(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["moored", "diagnose", "nowhere.jsonl", "--html", "page.html"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and "moored[report]" in capsys.readouterr().err


def test_a_report_that_fails_does_not_fail_the_run(run, monkeypatch, capsys):
    def fail(*_, **__):
        raise TypeError("a bug")

    pytest.importorskip("plotly")
    write_or_explain([run], run / "report.html", "moored report x")
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    monkeypatch.setattr("moored.analysis.report.build_report", fail)
    write_or_explain([run], run / "report.html", "moored report x")
    assert "no report (TypeError: a bug); `moored report " in capsys.readouterr().out


def test_help_does_not_import_plotly_or_jinja2(monkeypatch, capsys):
    for name in [n for n in sys.modules if n.partition(".")[0] in ("plotly", "jinja2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["moored", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "report" in capsys.readouterr().out
    assert not {"plotly", "jinja2"} & set(sys.modules)
