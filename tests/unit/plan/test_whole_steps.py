"""Plans of whole steps against the same steps on an H200, from 0.1 to 7 billion parameters."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from moored.plan import GPUS, Lengths, plan, shape_from_config

ROOT = Path(__file__).parents[3]
STORED = json.loads((ROOT / "benchmarks" / "results" / "plan_h200.json").read_text())["runs"]
CASES = [(run["command"], case) for run in STORED if "note" not in run for case in run["figures"]]


@pytest.fixture
def script(monkeypatch):
    """The benchmark, which knows what its command means."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("plan")


def test_every_size_of_the_issue_was_measured():
    assert {case["size"] for _, case in CASES} == {"0.1", "0.5", "1.5", "3", "7"}


@pytest.mark.parametrize(
    ("command", "case"), CASES, ids=[f"{case['size']}-{i}" for i, (_, case) in enumerate(CASES)]
)
def test_memory_is_planned_within_10_percent_and_seconds_within_30(script, command, case):
    words = [*shlex.split(command)[2:], "engine.device=cuda", "engine.dtype=bfloat16"]
    if "--set" not in words:
        words.insert(-2, "--set")
    arguments = script.parse_arguments(words)
    shape = shape_from_config(asdict(script.SIZES[case["size"]]), case["size"])
    lengths = Lengths(prompt=300, reply=100, turns=5, observation=50)
    config = script.make_config(arguments, case["algorithm"])
    found = script.compare(plan(config, shape, GPUS["h200"], lengths), script.Measured())
    measured = case["phases"]
    peaks = [row["measured_gib"] for row in measured.values() if row["measured_gib"]]
    planned = max(row["planned_gib"] for row in found.values() if row["planned_gib"])
    assert planned == pytest.approx(max(peaks), rel=0.1)
    for phase in ("rollout", "scoring", "update"):
        seconds = measured[phase]["measured_s"]
        if seconds > 0.01:
            assert found[phase]["planned_s"] == pytest.approx(seconds, rel=0.3)
