"""Weights of sharded models: every rank reads its part, and never has a whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moored.models.find import embedded_models
from tests.warm import SCRIPT, WarmProcess

pytestmark = pytest.mark.cluster

ONE_RANK = Path(__file__).parent / "one_rank.py"


def save_model(folder: Path, *, shard: str = "50GB", **shape: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64
        )
    )
    model.save_pretrained(folder, max_shard_size=shard)
    shutil.copy(embedded_models()["nano"] / "tokenizer.json", folder)
    shutil.copy(embedded_models()["nano"] / "tokenizer_config.json", folder)
    return model


def as_bin(folder: Path, model: LlamaForCausalLM) -> None:
    """The same weights in a format that cannot be read in parts."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def run_ranks(size: int, folder: Path, store: Path, *options: str) -> list[dict]:
    ranks = [
        WarmProcess([ONE_RANK, folder, str(rank), str(size), store, *options], code=SCRIPT)
        for rank in range(size)
    ]
    found = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, found[0][1]
    return [json.loads(out) for out, _ in found]


TINY: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 25,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("options", [[], ["optimizer.lora_rank=2"]])
def test_three_ranks_read_weights_that_do_not_divide_by_three(tmp_path, options):
    save_model(tmp_path / "model", shard="4KB", **TINY)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    found = run_ranks(3, tmp_path / "model", tmp_path / "store", *options)
    assert [rank["off"] for rank in found] == [0.0] * 3
    assert found[0]["logprobs"] == found[2]["logprobs"]


def test_ranks_get_weights_from_rank_0_that_cannot_be_read_in_parts(tmp_path):
    as_bin(tmp_path / "model", save_model(tmp_path / "model", **TINY))
    found = run_ranks(2, tmp_path / "model", tmp_path / "store")
    assert [rank["off"] for rank in found] == [0.0] * 2


LARGE: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
}


def test_a_rank_never_has_a_whole_model_beside_its_part(tmp_path):
    model = save_model(tmp_path / "model", shard="20MB", **LARGE)
    whole_mib = sum(weight.numel() for weight in model.parameters()) * 4 / 2**20
    trunk_mib = whole_mib - 8000 * 512 * 4 / 2**20
    assert whole_mib > 180
    # Policy, reference and critic, two ranks.
    shards_mib = (2 * whole_mib + trunk_mib) / 2
    # Pages of files and libraries that the system maps meanwhile count too: 25 to 50 MiB.
    limit_mib = shards_mib + whole_mib / 2
    for rank in run_ranks(2, tmp_path / "model", tmp_path / "store"):
        assert shards_mib < rank["peak_mib"] < limit_mib
    as_bin(tmp_path / "model", model)
    with_whole, _ = run_ranks(2, tmp_path / "model", tmp_path / "second_store")
    assert with_whole["peak_mib"] > limit_mib
