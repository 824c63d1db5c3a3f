"""The comparison of samplers, worked out by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def vllm_training(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("vllm_training")
    sys.modules.pop("vllm_training", None)


def test_noise_is_the_spread_of_paired_differences_over_seeds(vllm_training):
    found = vllm_training.compare(np.array([[5.0, 6.0], [1.0, 4.0]]))
    # Differences 1 and 3; with signs flipped their means are 2, -1, 1 and -2.
    assert (found["auto_mean"], found["vllm_mean"], found["difference"]) == (3.0, 5.0, 2.0)
    assert found["standard_error"] == pytest.approx(1.0)
    assert found["p"] == 0.5


def test_the_largest_gap_is_of_all_steps_and_seeds(vllm_training, tmp_path):
    found = vllm_training.Found()
    for seed, gaps in enumerate(([1e-6, 3e-6], [2e-6, 1e-6])):
        runs = {}
        for sampler in vllm_training.SAMPLERS:
            runs[sampler] = tmp_path / f"{sampler}-{seed}"
            runs[sampler].mkdir()
            rows = [{vllm_training.GAP: gap} for gap in gaps]
            for stream, names in vllm_training.FIGURES.items():
                for row in rows:
                    row |= dict.fromkeys(names, 1.0)
                text = "\n".join(map(json.dumps, rows))
                (runs[sampler] / f"{stream}.jsonl").write_text(text)
            timing = json.dumps(dict.fromkeys(vllm_training.PHASES, 0.5))
            (runs[sampler] / "timing.jsonl").write_text(timing)
        found.add(runs)
    record = found.record()
    assert record["largest_logp_gap"] == {"auto": 3e-6, "vllm": 3e-6}
    assert record["largest_logp_gap_of_last_step"] == {"auto": 3e-6, "vllm": 3e-6}
    assert record["compared"]["rollout/reward_mean"]["p"] == 1.0
