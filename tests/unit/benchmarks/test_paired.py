"""Figures of the same seeds on two sides, compared by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def paired(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("paired")
    sys.modules.pop("paired", None)


def test_noise_is_the_spread_of_paired_differences_over_seeds(paired):
    found = paired.compare(np.array([[5.0, 6.0], [1.0, 4.0]]), ("local", "cluster"))
    # Differences 1 and 3; with signs flipped their means are 2, -1, 1 and -2.
    assert (found["local_mean"], found["cluster_mean"], found["difference"]) == (3.0, 5.0, 2.0)
    assert found["standard_error"] == pytest.approx(1.0)
    assert found["p"] == 0.5


def test_a_figure_of_a_run_is_its_mean_over_the_steps_that_have_it(paired, tmp_path):
    values = {"a": ([1.0, None, 3.0], [2.0]), "b": ([5.0], [0.0, 4.0])}
    pairs = [{side: tmp_path / f"{side}{seed}" for side in values} for seed in (0, 1)]
    for seed, runs in enumerate(pairs):
        for side, run in runs.items():
            run.mkdir()
            for file, names in paired.FIGURES.items():
                rows = [dict.fromkeys(names, value) for value in values[side][seed]]
                (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = paired.compare_runs(pairs)["rollout/success_rate"]
    assert found["by_seed"] == [[2.0, 5.0], [2.0, 2.0]]
