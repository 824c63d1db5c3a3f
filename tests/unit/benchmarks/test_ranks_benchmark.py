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


def test_records_are_compared_by_all_their_numbers(script):
    ranks = script("ranks")
    record = {"b": [1, {"c": 2.5}], "a": 0.5, "text": "3"}
    assert list(ranks.numbers([record])) == [0.5, 1.0, 2.5]
