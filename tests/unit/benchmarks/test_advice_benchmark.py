"""The rule of `moored advise` beside what filters did: worked out by hand, and as stored."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from moored.analysis.curves import StoredRun, write_curve_file

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("advice")


def run_of(seed: int, *, ratio: float, share: float, end: float, mi: float) -> StoredRun:
    """Twenty steps: success 0.1 for ten, then `end`; MI 1 at the first look, then `mi`."""
    success = [(step, 0.1 if step <= 10 else end) for step in range(1, 21)]
    curves = {
        "success": success,
        # A second half that must not count.
        "Std/Mean of RV": [(step, ratio if step <= 10 else 9.0) for step in range(1, 21)],
        "outcome-free share": [(step, share if step <= 10 else 0.0) for step in range(1, 21)],
        "MI": [(1, 1.0), *((step, mi) for step in (5, 10, 15, 20))],
    }
    return StoredRun(seed=seed, alarm_step=None, curves=curves)


def write(file: Path, prefix: str, ratio: float, share: float, gain: float) -> Path:
    """Three seeds that differ by 0.01 in their gain, without the filter and with it."""
    without = [run_of(seed, ratio=ratio, share=share, end=0.1, mi=0.1) for seed in range(3)]
    filtered = [
        run_of(seed, ratio=ratio, share=0.0, end=0.1 + gain + 0.01 * (seed - 1), mi=0.6)
        for seed in range(3)
    ]
    write_curve_file(file, {f"{prefix}none": without, f"{prefix}top_p": filtered}, {})
    return file


def test_the_rule_stands_beside_what_the_filter_did_seed_by_seed(bench, tmp_path, capsys):
    files = [
        write(tmp_path / "hard.json", "grpo/", ratio=0.9, share=0.8, gain=0.2),
        write(tmp_path / "even.json", "", ratio=0.4, share=0.1, gain=0.0),
        write(tmp_path / "critic.json", "ppo/", ratio=0.5, share=0.8, gain=0.001),
    ]
    bench.main([*map(str, files), "--out", str(tmp_path / "out.json")])
    stored = json.loads((tmp_path / "out.json").read_text())
    advice = {study["name"]: study["advice"] for study in stored["studies"]}
    # The share of PPO is of other advantages, and says nothing.
    assert advice == {"hard, grpo": "filter", "even": "no_filter", "critic, ppo": "no_filter"}
    hard = stored["studies"][0]
    assert (hard["ratio"]["value"], hard["share"]["value"]) == pytest.approx((0.9, 0.8))
    # 0.19, 0.20, 0.21: standard error 0.01 / sqrt(3), t of 2 degrees of freedom 4.303.
    assert hard["success_gain"]["value"] == pytest.approx(0.2)
    assert hard["success_gain"]["half"] == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert hard["mi_gain"]["value"] == pytest.approx(0.5)
    assert hard["collapsed"] == {"none": 3, "top_p": 0}
    assert stored["outcomes"] == {"filter": ["gain"], "no_filter": ["no difference"] * 2}
    row = "| hard, grpo | 0.10 ± 0.00 | 0.90 ± 0.00 | 0.80 ± 0.00 | filter | 3, 0 of 3 |"
    assert f"{row} +0.20 ± 0.02 | +0.50 ± 0.00 |" in capsys.readouterr().out


def test_settings_without_their_figures_and_repeats_are_left_out_by_name(bench, tmp_path):
    one = write(tmp_path / "one.json", "", ratio=2.0, share=0.8, gain=0.2)
    (tmp_path / "two.json").write_text(one.read_text())
    old = json.loads(one.read_text())
    for runs in old["runs"].values():
        for run in runs:
            del run["curves"]["Std/Mean of RV"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    found, left_out = bench.read_all(sorted(tmp_path.glob("*.json")))
    assert list(found) == ["one"]
    assert left_out == {
        "old": "its curves have no Std/Mean of RV",
        "two": "the same runs as one",
    }


def test_auc_is_the_share_of_pairs_in_which_the_run_that_collapses_has_more(bench):
    # 3 and 2 against 1 and 2: more in three pairs of four, as much in the other.
    assert bench.auc([3, 1, 2, 2], [True, False, False, True]) == 0.875
    assert bench.auc([1, 2], [True, True]) is None
