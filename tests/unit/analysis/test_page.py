"""A diagnosis as a page: figures as in the JSON, texts escaped, written whole or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moored import __version__
from moored.analysis.diagnosis import Closeup, Diagnosis, Series, TurnLook
from moored.analysis.findings import METRICS
from moored.analysis.page import (
    check_can_write,
    most_and_least_tied,
    render_page,
    write_page,
)
from moored.analysis.sample import draw
from moored.analysis.scorers import Encoder, Scorer, Scorers
from moored.analysis.scoring import Size, diagnose, make_plan
from moored.analysis.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, Cuts, Placed, heat_map, plane
from moored.diagnostics.information import Likelihood
from moored.diagnostics.report import Regime, Verdict
from moored.errors import ConfigError, RunLogError
from moored.files.records import Record

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=y> & \"quoted\""
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps text, tags and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def score(requests) -> list[list[np.ndarray]]:
    return [[score_one(r.prompt.ids, ids) for ids in r.continuations] for r in requests]


def score_one(prompt: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The first id names the author, the second how much a reasoning shows of it, in %."""
    noise = np.random.default_rng([*prompt.tolist(), *ids.tolist()]).normal(-3, 0.3, len(ids))
    return np.minimum(noise + (prompt[0] == ids[0]) * ids[1] / 100, 0.0)


TOY = Scorer(name="toy", score=score, encoder=Encoder(None), shares_prompt=True)


MADE = datetime(2026, 11, 15, 12, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def collapsing() -> Diagnosis:
    """Twelve steps; after the sixth no reasoning shows its prompt."""
    rows = [
        Record(
            step=step,
            prompt=np.array([k % 8]),
            response=np.array([k % 8, 300 if step < 6 else 0, step, k]),
            think=(0, 4),
            rewards={"reward": float(k % 3)},
        )
        for step in range(12)
        for k in range(64)
    ]
    drawn = draw(rows, num_prompts=8, num_pairs=64)
    plan = make_plan(drawn, TOY, Size())
    return diagnose(plan, drawn, Scorers.single(TOY), draws=100, closeups=True)


def render(found: Diagnosis, command: str = "moored diagnose a.jsonl") -> str:
    return render_page(found, files=["a.jsonl"], command=command, made=MADE)


def with_series(found: Diagnosis, **changes) -> Diagnosis:
    """The only environment, changed."""
    (series,) = found.series
    return replace(found, series=(replace(series, **changes),))


def closeup(logp_MN, columns_M, prompts=("p", "q"), reasonings=None) -> Closeup:
    likelihood = Likelihood.of(np.array(logp_MN, dtype=float), np.array(columns_M))
    texts = reasonings or tuple(f"r{m}" for m in range(len(columns_M)))
    return Closeup(name="Step 1", prompts=prompts, reasonings=texts, token=likelihood)


def shown(value: float) -> str:
    return f"{value:.3f}".replace("-0.000", "0.000")


def test_one_look_of_many_steps_is_one_look(collapsing):
    (series,) = collapsing.series
    pooled = replace(series.looks[0], steps=tuple(range(1, 7)))
    page = Page(render(with_series(collapsing, looks=(pooled,), turns=(), alarm=None)))
    assert "1 to 6, 1 look" in page.texts


def test_figures_of_the_page_are_those_of_the_json(collapsing):
    page, whole = Page(render(collapsing)), json.loads(json.dumps(collapsing.to_dict()))
    (stored,) = whole["environments"]
    header, *rows = page.tables[0]
    assert [row[0] for row in rows] == [str(look["step"]) for look in stored["looks"]]
    for row, look in zip(rows, stored["looks"], strict=True):
        assert row[header.index("MI/token")] == shown(look["report"]["mi_estimate"])
        assert row[header.index("reward")] == shown(look["rewards"]["mean"])
        assert row[-1] == look["verdict"].replace("_", " ")
    metrics = {row[0]: row[1:] for row in page.tables[1][1:]}
    last = stored["looks"][-1]["report"]
    assert len(METRICS) == 14
    for name, (label, _) in METRICS.items():
        value, interval, p, _ = metrics[label]
        assert value == shown(last[name])
        if name in last["intervals"]:
            low, high = (shown(last["intervals"][name][end]) for end in ("low", "high"))
            assert interval == f"{low}…{high}"
        assert p == (shown(last["p_values"][name]) if name in last["p_values"] else "–")
    assert metrics["retrieval"][3] == "0.125"


def test_headline_says_since_when_it_is_collapsed_and_curves_mark_the_alarm(collapsing):
    since = collapsing.worst.collapsed_at
    # It takes two looks to overturn a verdict.
    assert collapsing.worst.alarm is not None and since is not None and since.step in (6, 7)
    text = render(collapsing)
    assert f"Collapsed since step {since.step}" in Page(text).texts
    assert "Go back to a checkpoint before the fall" in text
    # One vertical line in each of the five curves.
    assert text.count('class="mark"') == 5
    assert text.count('aria-label="Correlation of dependence and reward"') == 1
    healthy = render(with_series(collapsing, looks=collapsing.worst.looks[:6], alarm=None))
    assert "Healthy" in Page(healthy).texts and 'class="mark"' not in healthy


def test_a_page_that_cannot_tell_says_why_and_never_to_go_back_to_a_checkpoint(collapsing):
    last = collapsing.worst.looks[-1]
    why = "2 prompts cannot tell; about 30 are needed."
    unsure = replace(last.watched, verdict=Verdict.CANNOT_TELL, why=why, regime=None)
    looks = (*collapsing.worst.looks[:-1], replace(last, watched=unsure))
    text = render(with_series(collapsing, looks=looks, alarm=None))
    page = Page(text)
    assert "Cannot tell" in page.texts and why in page.texts
    assert "checkpoint" not in text
    assert '<h1 class="warning">' in text


def test_curves_stand_before_the_table_of_metrics(collapsing):
    text = render(collapsing)
    places = [text.index(mark) for mark in ("<h1", "Over the steps", "Every metric", "under every")]
    assert places == sorted(places)


def test_bands_are_drawn_from_standard_errors_where_nothing_was_resampled(collapsing):
    def without_bootstrap(series: Series):
        for look in series.looks:
            bare = replace(look.report, intervals={})
            yield replace(look, watched=replace(look.watched, report=bare))

    text = render(with_series(collapsing, looks=tuple(without_bootstrap(collapsing.worst))))
    bands = re.findall(r'class="band" points="([^"]*)"', text)
    # MI, retrieval, entropy and worth have twelve points each way; rewards have no errors.
    assert [len(points.split()) for points in bands] == [24, 24, 24, 0, 24]


def test_footer_has_command_date_and_version_and_one_sentence_says_why_mi_can_be_negative(
    collapsing,
):
    text = render(collapsing)
    foot = text[text.index("<footer>") :]
    assert "<code>moored diagnose a.jsonl</code>" in foot
    assert "2026-11-15 12:30 UTC" in foot and f"moored {__version__}" in foot
    assert text.count("MI can fall below zero:") == 1


def test_every_environment_has_its_own_curves(collapsing):
    (series,) = collapsing.series
    both = (replace(series, env="maze"), replace(series, env="sums", looks=series.looks[:6]))
    page = Page(render(replace(collapsing, series=both)))
    assert "".join(page.texts).count("MI can fall below zero:") == 1
    for title in ("maze: over the steps", "sums: over the steps", "sums: every metric of step 5"):
        assert title in "".join(page.texts)
    assert any(re.match(r"Collapsed since step [67] in maze; ", text) for text in page.texts)


def test_hostile_text_stays_text_and_nothing_is_fetched(collapsing):
    texts = (HOSTILE, "calm")
    seen = closeup([[-1, -2], [-2, -1]], [0, 1], (HOSTILE, HOSTILE + "2"), texts)
    text = render(collapsing.with_closeups([seen]), command=HOSTILE)
    page = Page(text)
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    # As prompt twice in the list and once each as an example, as reasoning, and as the command.
    assert "".join(page.texts).count("<script>alert('x')</script>") == 6
    assert not {"src", "href", "onerror", "style"} & page.attributes
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_a_single_look_without_closeup_has_no_curves_and_no_regimes_drawn(collapsing):
    one = with_series(collapsing, looks=collapsing.worst.looks[-1:], alarm=None)
    text = render(one.with_closeups([]))
    assert "Over the steps" not in text and 'class="own"' not in text
    assert 'class="lost"' not in text and text.count("<circle") == 1
    assert "By turn" not in text


def test_turns_are_a_section_of_their_own(collapsing):
    reports = [look.report for look in collapsing.worst.looks]
    turns = (TurnLook(turn=1, report=reports[-1]), TurnLook(turn=2, report=reports[0]))
    page = Page(render(with_series(collapsing, turns=turns)))
    assert "By turn of the episode" in page.texts
    header, first, second = page.tables[-1]
    assert header[:3] == ["turn", "M", "MI/token"]
    assert first[:3] == ["1", "64", shown(reports[-1].mi_estimate)]
    assert second[:3] == ["2", "64", shown(reports[0].mi_estimate)]


def test_heat_map_orders_rows_by_prompt_and_frames_own_cells():
    gain_MN = np.array([[-9.0, 1.0], [0.0, -0.5], [0.5, 2.0]])
    drawn = heat_map(gain_MN, np.array([1, 0, 1]), 1.0, "toy")
    cells = dict(re.findall(r'class="h(\d)" d="([^"]+)"', drawn))
    counts = {int(shade): d.count("M") for shade, d in cells.items()}
    # -9 -> 0, -0.5 -> 2, 0 -> 4, 0.5 -> 6, 1 and 2 -> 8.
    assert counts == {0: 1, 2: 1, 4: 1, 6: 1, 8: 2}
    # Row of prompt 1 first: its 0 stands at the top left.
    assert cells["4"].startswith(f"M{LEFT:.1f} {TOP + 14:.1f}h")
    frames = re.findall(
        r'class="own" x="([\d.]+)" y="([\d.]+)" width="\S+" height="([\d.]+)"', drawn
    )
    half = (LEFT + RIGHT) / 2
    assert [(float(x), float(y), float(h)) for x, y, h in frames] == [
        (LEFT, TOP + 14, 14),
        (half, TOP + 28, 28),
    ]


def test_plane_cuts_stand_where_regimes_change_and_points_have_the_verdict():
    looks = [
        Placed(1.0, 0.5, "good", "a"),
        Placed(1.2, 0.3, "warning", "b"),
        Placed(1.0, 0.0, "bad", "c"),
    ]
    drawn = plane(looks, Cuts(entropy=0.6, mi=0.1))
    # x runs from 0 to 1.1 * 1.2; y from 0 to 0.5, and 32 of 172 pixels more at either end.
    x = LEFT + 0.6 / 1.32 * (RIGHT - LEFT)
    y = BOTTOM - 32 - 0.1 / 0.5 * (172 - 2 * 32)
    assert f'd="M{LEFT} {y:.1f}H{RIGHT}M{x:.1f} {TOP}V{BOTTOM}"' in drawn
    assert re.findall(r'circle class="([a-z ]+)"', drawn) == ["good start", "warning", "bad"]
    for regime in Regime:
        assert regime.replace("_", " ") in drawn
    # The names of looks stand between those of the regimes, which are 9 pixels high.
    names = [text.replace("_", " ") for text in (Regime.DIVERSE, Regime.TEMPLATE_COLLAPSE)]
    heights = {
        text: float(height) for height, text in re.findall(r' y="([\d.]+)"[^>]*>([a-z ]+)<', drawn)
    }
    assert heights["start"] - 9 > heights[names[0]] and heights["end"] < heights[names[1]] - 9


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-0.4, 11.0, [0, 5, 10]),
        (118, 121, [118, 119, 120, 121]),
    ],
)
def test_ticks_are_round_numbers_inside(low, high, ticks):
    assert Axis(low, high, 0, 1).ticks() == pytest.approx(ticks)


def test_an_axis_of_equal_values_still_has_length():
    axis = Axis.over([0.0, 0.0], 0, 100)
    assert axis(0.0) == 50 and axis.ticks()


def test_most_and_least_tied_are_extremes_shown_once():
    seen = closeup(
        [[-1, -3], [-2, -2], [-2, -2], [-1, -5], [-3, -2]],
        [0, 0, 0, 1, 1],
        reasonings=("tied", "loose", "loose", "wrong", "fair"),
    )
    most, least = most_and_least_tied(seen)
    assert [example.reasoning for example in most] == ["tied", "fair"]
    assert [example.reasoning for example in least] == ["wrong", "loose"]
    # log(2 / (1 + e^-2)): own prompt e^2 times likelier than the other of two.
    assert most[0].gain == pytest.approx(np.log(2 / (1 + np.exp(-2))))


def test_where_a_page_cannot_be_written_is_told_before_anything_else(tmp_path):
    with pytest.raises(ConfigError, match="needs a file, got the folder"):
        check_can_write(tmp_path)
    with pytest.raises(ConfigError, match=r"folder .*none' does not exist; make it first"):
        check_can_write(tmp_path / "none" / "page.html")
    check_can_write(tmp_path / "page.html")


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path, monkeypatch, collapsing):
    def fill_disk(self: Path, text: str, **options) -> int:
        self.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    file = tmp_path / "page.html"
    file.write_text("old")
    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(RunLogError, match="No space left"):
        write_page(file, collapsing, files=["a"], command="moored")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_bytes_that_are_no_text_do_not_stop_the_page(tmp_path, collapsing):
    file = tmp_path / "page.html"
    write_page(file, collapsing, files=["a\udcff.jsonl"], command="n\0ul")
    assert "a?.jsonl" in file.read_text() and "\0" not in file.read_text()
