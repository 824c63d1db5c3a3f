"""A diagnosis as a page: figures as in the JSON, texts escaped, written whole or not at all."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from moored.analysis.diagnosis import Closeup, Diagnosis, TurnLook
from moored.analysis.findings import METRICS, Kind
from moored.analysis.report import Report
from moored.analysis.report_diagnosis import most_and_least_tied, report_of_diagnosis
from moored.analysis.report_page import check_can_write, render_report, write_report
from moored.analysis.stored import read_diagnosis
from moored.diagnostics.information import Likelihood
from moored.errors import ConfigError, RunLogError

ROOT = Path(__file__).parents[3]
HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=y> & \"quoted\""


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory) -> Diagnosis:
    """Looks at steps 1, 4, … 20, collapsed with an alarm at step 12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        bench = importlib.import_module("report")
    folder = tmp_path_factory.mktemp("runs") / "run"
    return read_diagnosis(bench.make_run(folder, num_steps=20, look_every=4, collapses=True))


def report_on(found: Diagnosis, files: tuple[str, ...] = ("a.jsonl",)) -> Report:
    return report_of_diagnosis(found, files, command="moored diagnose a.jsonl")


def page_of(report: Report) -> str:
    pytest.importorskip("plotly")
    return render_report(report, made=datetime(2026, 11, 15, 12, 30, tzinfo=UTC))


def with_series(found: Diagnosis, **changes) -> Diagnosis:
    """The only environment, changed."""
    (series,) = found.series
    return replace(found, series=(replace(series, **changes),))


def section(report: Report, title: str):
    return next(each for each in report.sections if each.title.startswith(title))


def closeup(logp_MN, columns_M, prompts=("p", "q"), reasonings=None) -> Closeup:
    likelihood = Likelihood.of(np.array(logp_MN, dtype=float), np.array(columns_M))
    texts = reasonings or tuple(f"r{m}" for m in range(len(columns_M)))
    return Closeup(name="Step 1", prompts=prompts, reasonings=texts, token=likelihood)


def shown(value: float) -> str:
    return f"{value:.3f}".replace("-0.000", "0.000")


def test_tables_have_the_figures_of_every_look_and_every_metric_of_the_last(collapsed):
    report = report_on(collapsed)
    looks = collapsed.series[0].looks
    (grid,) = section(report, "All looks").grids.values()
    assert [row[0] for row in grid.rows] == [str(look.step) for look in looks]
    for row, look in zip(grid.rows, looks, strict=True):
        assert row[grid.header.index("MI/token")] == shown(look.report.mi_estimate)
        assert look.rewards and row[grid.header.index("reward")] == shown(look.rewards.mean)
    assert [row[0] for row in grid.rows if row[-1] == "collapsed, alarm"] == ["12"]
    ((caption, metrics),) = section(report, "Every metric").grids.items()
    rows = {row[0]: row[1:] for row in metrics.rows}
    for name, (label, _) in METRICS.items():
        assert rows[label][0] == shown(getattr(looks[-1].report, name))
    assert caption == "step 20" and rows["retrieval"][3] == "0.125"


def test_the_headline_says_since_when_and_every_curve_marks_the_alarm(collapsed):
    report = report_on(collapsed)
    assert report.title == "Collapsed since step 12" and report.kind is Kind.BAD
    figures = section(report, "Over the steps").figures
    slugs = ["mi_estimate", "retrieval_accuracy", "conditional_entropy_est", "reward"]
    assert [drawn.slug for drawn in figures] == slugs
    for drawn in figures:
        shapes = drawn.chart["layout"]["shapes"]
        assert [shape["x0"] for shape in shapes if "xref" not in shape] == [12]


def test_the_plane_is_cut_at_shares_of_the_first_look(collapsed):
    first = collapsed.series[0].looks[0].report
    _, mi_cut, entropy_cut = report_on(collapsed).figures["plane"].chart["layout"]["shapes"]
    assert mi_cut["y0"] == pytest.approx(0.2 * first.mi_estimate)
    assert entropy_cut["x0"] == pytest.approx(0.5 * first.conditional_entropy_est)


def test_every_environment_has_its_own_curves_and_its_own_alarm(collapsed):
    (series,) = collapsed.series
    healthy = replace(series, env="sums", looks=series.looks[:2], alarm=None)
    report = report_on(replace(collapsed, series=(replace(series, env="maze"), healthy)))
    assert report.title == "Collapsed since step 12 in maze; healthy in sums"
    maze, sums = (section(report, f"{env}: over the steps") for env in ("maze", "sums"))
    assert "alarm of step 12" in maze.text and "alarm" not in sums.text
    assert "MI can fall below zero:" in maze.text and "below zero" not in sums.text
    assert len(report.figures) == 2 * 4 + 2
    assert list(section(report, "Every metric").grids) == ["maze, step 20", "sums, step 4"]


def test_a_single_look_has_neither_curves_nor_regimes(collapsed):
    report = report_on(with_series(collapsed, looks=collapsed.series[0].looks[-1:], alarm=None))
    assert list(report.figures) == ["plane"]
    drawn = report.figures["plane"]
    assert "shapes" not in drawn.chart["layout"] and "no start" in drawn.caption
    assert drawn.chart["data"][0]["marker"]["symbol"] == ["circle"]


def test_files_and_steps_are_named_and_pooled_steps_are_one_look(collapsed):
    pooled = replace(collapsed.series[0].looks[0], steps=tuple(range(1, 7)))
    report = report_on(with_series(collapsed, looks=(pooled,), alarm=None), tuple("abcdefgh"))
    assert report.facts == {"files": "a, b, c, d, e, f and 2 more", "steps": "1 to 6, 1 look"}
    scored = replace(collapsed, token_forwards=1234, seconds=2.0)
    assert report_on(scored).facts["cost"] == "1,234 token-forwards in 2.0 s"


def test_turns_are_a_section_of_their_own(collapsed):
    reports = [look.report for look in collapsed.series[0].looks]
    turns = (TurnLook(turn=1, report=reports[-1]), TurnLook(turn=2, report=reports[0]))
    by_turn = section(report_on(with_series(collapsed, turns=turns)), "By turn of the episode")
    (grid,) = by_turn.grids.values()
    assert grid.header[:3] == ("turn", "M", "MI/token")
    assert [row[:3] for row in grid.rows] == [
        ("1", "64", shown(reports[-1].mi_estimate)),
        ("2", "64", shown(reports[0].mi_estimate)),
    ]
    (bars,) = by_turn.figures[0].chart["data"]
    assert bars["y"][1] == pytest.approx(reports[0].mi_estimate, abs=1e-3)
    assert bars["error_y"]["array"][1] > 0


def test_first_and_last_look_are_mapped_on_one_scale(collapsed):
    tied, loose = closeup([[0, -9], [-9, 0]], [0, 1]), closeup([[-1, -1], [-1, -1]], [0, 1])
    maps = section(report_on(collapsed.with_closeups([tied, loose])), "Scores").figures
    first, last = (drawn.chart["data"][0] for drawn in maps)
    assert first["zmax"] == last["zmax"] == pytest.approx(np.log(2), abs=1e-3)
    assert first["z"][0][0] > 0.6 and last["z"] == [[0.0, 0.0], [0.0, 0.0]]


def test_hostile_text_stays_text_and_nothing_is_fetched(collapsed):
    seen = closeup([[-1, -2], [-2, -1]], [0, 1], (HOSTILE, HOSTILE + "2"), (HOSTILE, "calm"))
    report = report_on(collapsed.with_closeups([seen]), (HOSTILE,))
    page = page_of(report)
    assert HOSTILE not in page and "<img" not in page
    # As file, as prompt in the list of both and of two examples, and as reasoning.
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 6
    assert "default-src 'none'" in page and page.count("sha256-") == 2
    assert "<code>moored diagnose a.jsonl</code>" in page and "2026-11-15 12:30 UTC" in page


def test_most_and_least_tied_are_extremes_shown_once():
    seen = closeup(
        [[-1, -3], [-2, -2], [-2, -2], [-1, -5], [-3, -2]],
        [0, 0, 0, 1, 1],
        reasonings=("tied", "loose", "loose", "wrong", "fair"),
    )
    most, least = most_and_least_tied(seen)
    assert [example.passages[0].written for example in most] == ["tied", "fair"]
    assert [example.passages[0].written for example in least] == ["wrong", "loose"]
    # log(2 / (1 + e^-2)): own prompt e^2 times likelier than the other of two.
    (gain,) = re.findall(r"\+(\d\.\d+)", most[0].title)
    assert float(gain) == pytest.approx(np.log(2 / (1 + np.exp(-2))), abs=1e-3)


def test_where_a_page_cannot_be_written_is_told_before_anything_else(tmp_path):
    with pytest.raises(ConfigError, match="--html needs a file"):
        check_can_write(tmp_path, "--html")
    with pytest.raises(ConfigError, match=r"none' does not exist"):
        check_can_write(tmp_path / "none" / "page.html", "--html")
    check_can_write(tmp_path / "page.html", "--html")


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch, collapsed):
    def fill_disk(self: Path, text: str, **options) -> int:
        self.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    file.write_text("old")
    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(RunLogError, match="No space left"):
        write_report(file, report_on(collapsed))
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_bytes_that_are_no_text_do_not_stop_the_page(collapsed):
    page = page_of(report_on(collapsed, ("a\udcff.jsonl", "n\0ul")))
    assert "a?.jsonl" in page and "\0" not in page
