"""Models the engine cannot serve are refused before a run, not trained wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from moored.engine.build import make_sampler
from moored.engine.check import check_engine
from moored.engine.local.learner import LocalLearner
from moored.errors import MooredError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def check(config, max_context: int = 64, **options) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, value in options.items():
        setattr(model.config, name, value)
    sampler = make_sampler(model, bf16=False, max_context=max_context)
    learner = LocalLearner(model)
    check_engine(model, learner, sampler, temperature=1.0, max_context=max_context, bf16=False)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "GPTNeoX", "Gemma"])
def test_models_that_work_pass(kind):
    check(getattr(transformers, f"{kind}Config")(**SIZES, intermediate_size=64))


def test_gpt2_which_is_not_llama_shaped_passes():
    check(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))


def test_a_window_shorter_than_the_dialogues_is_refused():
    config = transformers.MistralConfig(**SIZES, intermediate_size=64, sliding_window=16)
    with pytest.raises(MooredError, match="max_context to 16 or less"):
        check(config)
    check(config, max_context=16)


def test_a_model_whose_logits_are_made_otherwise_is_refused():
    config = transformers.CohereConfig(**SIZES, intermediate_size=64, logit_scale=0.25)
    with pytest.raises(MooredError, match=r"cohere.* differ from the model's by"):
        check(config)


def test_a_model_with_another_cache_is_refused():
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32
    )
    with pytest.raises(MooredError, match="'opt' do not work"):
        check(config)
