"""The measurement of reading writes whole files and reads all of their rows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

ROOT = Path(__file__).parents[3]


def test_both_commands_read_every_row_of_both_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    out = tmp_path / "read.json"
    importlib.import_module("read").main(["--gigabytes", "0.004", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    assert list(figures) == [
        f"{kind}, {reader}"
        for kind in ("JSON lines", "Parquet")
        for reader in ("advise", "diagnose")
    ]
    for row in figures.values():
        # 4 MB of reasonings of 3,400 characters, in 2 steps of 1,024 rows at most.
        assert row["rows"] == 1176
        assert 4 < row["file_mb"] < 5
        assert 0 < row["start_mb"] < row["peak_mb"]
