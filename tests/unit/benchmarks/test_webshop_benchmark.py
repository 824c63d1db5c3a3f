"""The benchmark of the web shop counts what it says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_every_kind_of_page_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    out = tmp_path / "webshop.json"
    monkeypatch.setattr(sys, "argv", ["webshop.py", "--episodes", "30", "--json", str(out)])
    importlib.import_module("webshop").main()
    found = json.loads(out.read_text())
    assert list(found["median_us"]) == ["search", "results", "item", "sub-page", "buy"]
    assert found["num_products"] == 1200 and found["num_actions"] > 100
    assert "actions/s, target 2,000" in capsys.readouterr().out
