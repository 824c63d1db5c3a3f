"""How long a dialogue may be is read alike from a config.json and from a loaded model's config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.models.find import description_here
from moored.models.folder import read_description
from moored.models.hub import downloaded_folder
from moored.models.lengths import position_limit, read_positions, sliding_window
from tests.tiny_model import tiny_model

LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
FEW = {"max_position_embeddings": 512}


def described(folder: Path, **values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("kind", "values", "limit"),
    [
        ("llama", FEW, 512),
        ("llama", {**FEW, "rope_parameters": LINEAR}, None),
        ("llama", {**FEW, "rope_scaling": {"type": "linear", "factor": 8.0}}, None),
        ("gemma3_text", FEW, 512),
        ("gemma3_text", {**FEW, "rope_scaling": LINEAR}, None),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", **FEW}}, 512),
        (
            "gemma3",
            {"text_config": {"model_type": "gemma3_text", **FEW, "rope_scaling": LINEAR}},
            None,
        ),
        ("llama", {**FEW, "rope_scaling": {"type": "dynamic", "factor": 8.0}}, 512),
        ("phi3", {**FEW, "rope_scaling": LONG, "original_max_position_embeddings": 64}, 64),
        ("gpt2", {"n_positions": 512}, 512),
        ("mpt", {"max_seq_len": 512}, 512),
        ("falcon", {**FEW, "alibi": False}, 512),
        ("falcon", {**FEW, "alibi": True}, None),
        ("bloom", FEW, None),
        ("mamba", {}, None),
    ],
)
def test_files_and_the_model_agree_on_how_many_tokens_it_was_made_for(
    kind, values, limit, tmp_path
):
    """In what people write, and in what transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    folder = described(tmp_path, model_type=kind, **values)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (position_limit(read_description(folder)), position_limit(config)) == (limit, limit)
    config.save_pretrained(tmp_path / "saved")
    assert position_limit(read_description(tmp_path / "saved")) == limit


@pytest.mark.parametrize(
    ("kind", "values", "window"),
    [
        ("mistral", {"sliding_window": 256}, 256),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {}, None),
        ("qwen2", {"sliding_window": 256, "use_sliding_window": True}, 256),
        ("qwen2", {"sliding_window": 256, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 256}, None),
        ("qwen3", {"sliding_window": 256}, None),
        ("smollm3", {"sliding_window": 256}, None),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", "sliding_window": 256}}, 256),
        ("gpt_neo", {"window_size": 256}, 256),
    ],
)
def test_files_and_the_model_agree_on_how_far_its_layers_look_back(kind, values, window, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = described(tmp_path, model_type=kind, **values)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (sliding_window(read_description(folder)), sliding_window(config)) == (window, window)


def test_a_limit_is_how_far_the_model_itself_can_compute():
    """Falcon and BLOOM with ALiBi go on; the biases of MPT end at the length that it says."""
    torch = pytest.importorskip("torch")
    tokens = torch.arange(40)[None]
    for kind, values in (("falcon", {"alibi": True, "max_position_embeddings": 16}), ("bloom", {})):
        endless = tiny_model(kind, **values)
        assert position_limit(endless.config) is None
        assert torch.isfinite(endless(input_ids=tokens).logits).all()
    bounded = tiny_model("mpt", max_seq_len=16)
    assert position_limit(bounded.config) == 16
    bounded(input_ids=tokens[:, :16])
    with pytest.raises(RuntimeError, match="must match"):
        bounded(input_ids=tokens)


@pytest.mark.parametrize("value", [None, "512", True, 0, -1, 512.0])
def test_what_is_no_whole_number_bounds_nothing(value):
    config = {"max_position_embeddings": value, "sliding_window": value}
    assert read_positions(config) is None and sliding_window(config) is None


def test_a_hub_id_is_described_by_what_was_downloaded_of_it(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert description_here("org/name") == {}
    models = tmp_path / "models--org--name"
    (models / "refs").mkdir(parents=True)
    (models / "refs" / "main").write_text("abc")
    folder = described(models / "snapshots" / "abc", **FEW)
    assert downloaded_folder("org/name") == folder
    assert description_here("org/name") == FEW


@pytest.mark.parametrize("name", ["a/b/c", "/no/such", "-x/..y", "smollm2"])
def test_a_name_that_is_no_hub_id_is_not_described(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert description_here(name) == {}
    if "/" in name:
        assert downloaded_folder(name) is None


def test_smollm2_is_not_described_by_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described(tmp_path / "smollm2", **FEW)
    assert description_here("smollm2") == {}


def test_an_adapter_is_described_by_its_base(tmp_path):
    base, adapter = described(tmp_path / "base", **FEW), tmp_path / "adapter"
    adapter.mkdir()
    named = {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    assert description_here(str(adapter)) == FEW
