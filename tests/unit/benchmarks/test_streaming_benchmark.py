"""The comparison of streamed with batch decisions counts what it says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("streaming")


def test_agreement_by_hand(streaming):
    scores, kept, batch = (
        np.array([4.0, 3, 2, 1]),
        [True, True, False, True],
        [True, True, True, False],
    )
    found = streaming.compare(scores, np.array(kept), np.array(batch))
    assert found == streaming.Agreement(2 / 3, 2 / 3, 0.8, 0.9)


def test_batches_are_decided_one_by_one(streaming):
    kept = streaming.batch_decisions(np.array([4.0, 1, 1, 0]), np.array([0, 0, 1, 1]), 0.5)
    assert kept.tolist() == [True, False, True, False]


def test_the_whole_script_writes_its_figures(streaming, tmp_path):
    out = tmp_path / "streaming.json"
    streaming.main(["--groups", "64", "--seeds", "1", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]["graded, steady"]
    assert set(figures) == {"16", "32", "64", "128", "256", "512", "batch"}
    assert 0.8 < figures["64"]["kept_mass"] < 1.0
