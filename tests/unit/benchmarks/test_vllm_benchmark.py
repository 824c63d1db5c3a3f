"""The comparison of samplers, worked out by hand."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def vllm_training(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("vllm_training")
    for name in ("vllm_training", "paired"):
        sys.modules.pop(name, None)


def test_the_largest_gap_is_of_all_steps_and_seeds(vllm_training, tmp_path):
    found = vllm_training.Found()
    for seed, gaps in enumerate(([1e-6, 3e-6], [2e-6, 1e-6])):
        runs = {}
        for sampler in vllm_training.SAMPLERS:
            runs[sampler] = tmp_path / f"{sampler}-{seed}"
            runs[sampler].mkdir()
            rows = [{vllm_training.GAP: gap} for gap in gaps]
            for file, names in importlib.import_module("paired").FIGURES.items():
                for row in rows:
                    row |= dict.fromkeys(names, 1.0)
                text = "\n".join(map(json.dumps, rows))
                (runs[sampler] / file).write_text(text)
            timing = json.dumps(dict.fromkeys(vllm_training.PHASES, 0.5))
            (runs[sampler] / "timing.jsonl").write_text(timing)
        found.add(runs)
    record = found.record()
    assert record["largest_logp_gap"] == {"auto": 3e-6, "vllm": 3e-6}
    assert record["largest_logp_gap_of_last_step"] == {"auto": 3e-6, "vllm": 3e-6}
    assert record["compared"]["rollout/reward_mean"]["p"] == 1.0
