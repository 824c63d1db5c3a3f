"""A tiny random model of each family of models: trains, samples, scores, and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from moored.engine.fast.sampler import SlotSampler
from moored.errors import MooredError
from moored.runlog.log import read_records
from moored.train import build_run, resume, start, train
from tests.e2e.toys import HERE, toy_config, weights_of

SMALL = {
    "vocab_size": 9,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama-3.2": (transformers.LlamaConfig, {"rope_parameters": LLAMA_3}),
    "smollm2": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "qwen2.5": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "gemma-2": (transformers.Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma-3": (transformers.Gemma3TextConfig, {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi": (transformers.PhiConfig, {"partial_rotary_factor": 0.5}),
    "phi-3": (transformers.Phi3Config, {}),
    "olmo-2": (transformers.Olmo2Config, {}),
    "gpt-2": (transformers.GPT2Config, {}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "head_dim": 16}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
}
FAST = {"llama-3.2", "smollm2", "qwen2.5", "qwen3", "mistral"}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, toy_folder, tmp_path_factory) -> tuple[str, Path]:
    """A family and the folder of a model of it, with the toy's tokenizer."""
    folder = tmp_path_factory.mktemp("family") / "model"
    kind, options = FAMILIES[request.param]
    shutil.copytree(toy_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SMALL, **options}))
    model.save_pretrained(folder)
    return request.param, folder


def test_every_family_trains_samples_scores_and_resumes(family, tmp_path):
    torch.set_num_threads(1)
    name, folder = family
    config = toy_config(
        folder,
        f"env={HERE}:Late",
        "num_steps=2",
        "checkpoint_every=1",
        "rollout.group_size=4",
        "rollout.max_context=128",
        "collapse.every=1",
        "algorithm.kl_coef=0.01",
        "filter.rule=none",
    )
    start(whole := build_run(config, tmp_path / "whole"))
    train(whole)
    assert isinstance(whole.engine.sampler, SlotSampler) == (name in FAST)
    # The log-probabilities of the sampler, over a cache kept for three turns, are the learner's.
    for record in read_records(tmp_path / "whole"):
        assert float(str(record["mismatch/logp_gap_max"])) < 1e-5
        assert float(str(record["learner/grad_norm"])) > 0
    assert len(read_records(tmp_path / "whole", "collapse")) == 2
    # A run that was killed in its second step.
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step_000002")
    resume(second := build_run(config, tmp_path / "killed", resume=True))
    assert second.next_step == 2
    train(second)
    theirs = weights_of(second)
    for weight, tensor in weights_of(whole).items():
        assert torch.equal(tensor, theirs[weight]), weight


def test_the_page_on_models_says_which_families_take_the_fast_path():
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {row[1].strip().strip("`"): row[3].strip() == "fast" for row in rows}
    assert found == {name: name in FAST for name in FAMILIES}


def test_a_context_longer_than_the_models_is_refused_before_the_first_step(family, tmp_path):
    name, folder = family
    config = toy_config(folder, f"env={HERE}:Late", "rollout.max_context=257")
    if name in ("llama-3.2", "gemma-2", "gemma-3"):
        pytest.skip("scales its angles, or looks back no further")
    with pytest.raises(MooredError, match=r"max_context = 257 is longer than the 256 tokens"):
        build_run(config, tmp_path / "run")
