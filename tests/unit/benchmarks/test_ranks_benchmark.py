"""What one rank costs is measured on the same samples; runs are compared number by number."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SMALL = ["--shape", "toy", "--groups", "1", "--group-size", "2", "--prompt-tokens", "8"]
SMALL += ["--reply-tokens", "10", "--device", "cpu", "--repeats", "1"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_one_rank_and_one_process_make_the_same_update_and_publish_in_turn(script, tmp_path):
    file = tmp_path / "found.json"
    script("ranks_gpu").main([*SMALL, "--out", str(file)])
    found = json.loads(file.read_text())["figures"]["toy"]
    for what in ("update", "publish"):
        sides = found[what]
        seconds = [sides[name]["median_s"] for name in ("local", "torchrun")]
        assert sides["cost"] == pytest.approx(seconds[1] / seconds[0] - 1.0)
        assert sides["local"]["tokens"] == sides["torchrun"]["tokens"]


def test_a_rank_that_holds_nothing_whole_is_measured_beside_one_that_does(script, tmp_path, capsys):
    file = tmp_path / "found.json"
    benchmark = script("ranks_gpu")
    sizes, make = [], benchmark.ShardedLearner

    def make_learner(model, *args, **kwargs):
        learner = make(model, *args, **kwargs)
        sizes.append(len(learner._sharded[model].parts))
        return learner

    benchmark.ShardedLearner = make_learner
    try:
        benchmark.main([*SMALL, "--layers", "--out", str(file)])
    finally:
        benchmark.ShardedLearner = make
    assert sizes[0] == 1 < sizes[1]
    found = json.loads(file.read_text())["figures"]["toy"]["update"]
    assert found["in layers"]["tokens"] == found["local"]["tokens"]
    assert "update: one rank (in layers) takes" in capsys.readouterr().out


def test_records_are_compared_by_all_their_numbers(script):
    ranks = script("ranks")
    record = {"b": [1, {"c": 2.5}], "a": 0.5, "text": "3"}
    assert list(ranks.numbers([record])) == [0.5, 1.0, 2.5]
