"""Models without weights: all else is as `load_model` has it, and every weight has its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from moored.models.find import embedded_models
from moored.models.load import load_model
from moored.models.outline import read_outline

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GPT2: dict[str, Any] = {
    "vocab_size": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "qwen": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "gemma": Gemma3TextConfig(**SHAPE),
    "gpt2": GPT2Config(**GPT2, bos_token_id=1),
}


def save(folder: Path, config, *, shard: str = "50GB", dtype=torch.float32) -> str:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=[2, 3])
    model.save_pretrained(folder, max_shard_size=shard)
    shutil.copy(embedded_models()["nano"] / "tokenizer.json", folder)
    return str(folder)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_outline_has_all_but_the_weights(family, tmp_path):
    name = save(tmp_path / "model", CONFIGS[family], shard="4KB")
    outline, loaded = read_outline(name, exact=True), load_model(name, CPU).model
    assert outline is not None
    model = outline.model
    assert type(model) is type(loaded) and not model.training
    assert all(weight.is_meta for weight in model.parameters())
    wanted = dict(loaded.named_buffers())
    for key, buffer in model.named_buffers():
        assert buffer.dtype == wanted.pop(key).dtype
        assert torch.equal(buffer, dict(loaded.named_buffers())[key])
    assert not wanted
    assert model.generation_config is not None and loaded.generation_config is not None
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    for key, weight in loaded.named_parameters():
        place = outline.places[key]
        assert torch.equal(load_file(place.file)[place.name], weight)
    assert len(outline.places) == len(list(model.parameters()))


def test_precision_is_that_of_the_files_unless_exact(tmp_path):
    name = save(tmp_path, CONFIGS["llama"], dtype=torch.bfloat16)
    for exact, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        outline = read_outline(name, exact=exact)
        assert outline is not None
        assert {weight.dtype for weight in outline.model.parameters()} == {dtype}
        assert load_model(name, CPU, exact=exact).model.dtype == dtype


def test_names_without_the_prefix_of_the_trunk_are_found(tmp_path):
    name = save(tmp_path, CONFIGS["qwen"])
    rename(tmp_path, lambda key: key.removeprefix("model."))
    outline = read_outline(name, exact=True)
    assert outline is not None
    assert outline.places["model.norm.weight"].name == "norm.weight"


def rename(folder: Path, new) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {new(key): tensor for key, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def test_experts_that_are_stored_one_by_one_cannot_be_read_in_parts(tmp_path):
    assert read_outline(save(tmp_path, Qwen3MoeConfig(**SHAPE, num_experts=2)), exact=True) is None


def test_weights_that_are_missing_or_of_another_shape_are_left_to_the_loader(tmp_path):
    name = save(tmp_path, CONFIGS["llama"])
    described = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("num_hidden_layers", 3), ("vocab_size", 17)):
        (tmp_path / "config.json").write_text(json.dumps({**described, key: value}))
        assert read_outline(name, exact=True) is None


def test_a_tied_pair_that_is_stored_twice_is_left_to_the_loader(tmp_path):
    name = save(tmp_path, CONFIGS["qwen"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_outline(name, exact=True) is None


def test_embedded_models_can_be_read_in_parts():
    assert all(read_outline(name, exact=True) for name in embedded_models())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_that_are_read_one_at_a_time_are_those_of_a_whole_load(tmp_path, kind, exact):
    name = save(tmp_path, CONFIGS[kind], shard="2KB", dtype=torch.bfloat16)
    outline = read_outline(name, exact=exact)
    assert outline is not None
    found, wanted = dict(outline.weights()), load_model(name, CPU, exact=exact).model.state_dict()
    assert list(found) == list(wanted)
    for key, weight in wanted.items():
        assert found[key].dtype == weight.dtype
        assert torch.equal(found[key], weight)
