"""The comparison with TRL, as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm import run_script

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "train_step.py"


def test_trl_trains_on_as_many_tokens_as_moored(tmp_path):
    pytest.importorskip("trl")
    out = tmp_path / "step.json"
    words = "--device cpu --groups 2 --group-size 2 --reply-tokens 4 --repeats 1"
    # A process of its own: TRL gives warnings that are not about our code.
    done = run_script(SCRIPT, *words.split(), "--trl-micro-batch", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(out.read_text())["figures"]["pairs"]
    # 2 tasks x 2 replies x 4 tokens
    assert pair["moored"]["tokens"] == pair["trl"]["tokens"] == [16]
    ratio = pair["trl"]["median_s"] / pair["moored"]["median_s"]
    assert pair["speed_up"] == pytest.approx(ratio)
