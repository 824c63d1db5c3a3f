"""The benchmark of the sandbox runs, and says what it ran on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_benchmark_times_programs_and_judges_rows(tmp_path: Path) -> None:
    row = {"task_id": 601, "text": "Half.", "code": "def half(x): return x / 2"}
    rows = tmp_path / "mbpp.jsonl"
    rows.write_text(json.dumps({**row, "test_list": ["assert half(1) == 0.5"]}))
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(rows.read_bytes())
    command = [sys.executable, ROOT / "benchmarks" / "sandbox.py", "--programs=3"]
    done = subprocess.run([*command, "--data", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    judged = record["figures"]["mbpp.jsonl"]
    assert record["figures"]["short programs"]["count"] == 3
    assert (judged["num_passed"], judged["wrong_programs_passed"]) == (1, 0)
    assert {"command", "python", "bubblewrap", "kernel", "cores"} <= set(record)
