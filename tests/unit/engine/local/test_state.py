"""What a learner leaves on disk."""

from __future__ import annotations

import copy
import resource

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from moored.config import load_config
from moored.engine.local.learner import LocalLearner
from moored.engine.local.state import export_model, load_weights, save_tokenizer
from moored.errors import MooredError
from moored.models.load import load_tokenizer
from moored.types import Prompt, ScoreRequest
from tests.tiny_model import tiny_model

REQUEST = ScoreRequest(Prompt(np.arange(5)), [np.array([9, 3, 7])])


def with_lora(model, seed: int = 1):
    torch.manual_seed(seed)
    options = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, options)
    with torch.no_grad():  # as if trained: fresh LoRA changes nothing
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return wrapped


def logprobs(model) -> np.ndarray:
    return LocalLearner(model).score([REQUEST])[0][0]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_lora", [True, False])
def test_an_exported_model_needs_nothing_but_transformers(tmp_path, is_tied, has_lora):
    model = tiny_model(tie_word_embeddings=is_tied)
    model = with_lora(model) if has_lora else model
    before = copy.deepcopy(model.state_dict())
    export_model(model, tmp_path, torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    np.testing.assert_allclose(logprobs(loaded), logprobs(model), atol=1e-5)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not is_tied


def test_an_export_in_bfloat16_holds_the_rounded_weights_and_says_so(tmp_path):
    model = tiny_model()
    export_model(model, tmp_path, torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16 and model.dtype == torch.float32
    expected = model.model.embed_tokens.weight.to(torch.bfloat16)
    assert torch.equal(loaded.model.embed_tokens.weight, expected)


def test_sampling_settings_that_transformers_refuses_to_save_do_not_stop_an_export(tmp_path):
    model = tiny_model()
    model.generation_config.temperature = 0.6  # without do_sample, as some published models have it
    export_model(model, tmp_path, torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.6


def test_a_tokenizer_for_which_there_is_no_room_is_an_error_of_the_disk(tmp_path):
    tokenizer = load_tokenizer("nano")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_tokenizer(tokenizer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def test_a_lora_state_holds_adapters_alone_and_loads_onto_another_copy(tmp_path):
    LocalLearner(with_lora(tiny_model())).save(tmp_path)
    saved = load_file(tmp_path / "policy.safetensors")
    assert len(saved) == 2 * 7 * 2 and all("lora" in name for name in saved)
    other = with_lora(tiny_model(), seed=2)
    assert not np.allclose(logprobs(other), logprobs(with_lora(tiny_model())))
    load_weights(other, tmp_path / "policy.safetensors")
    np.testing.assert_array_equal(logprobs(other), logprobs(with_lora(tiny_model())))


@pytest.mark.parametrize("other", [tiny_model(hidden_size=64), with_lora(tiny_model())])
def test_weights_of_another_model_are_refused_before_anything_changes(tmp_path, other):
    LocalLearner(tiny_model(), load_config({})).save(tmp_path)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(MooredError, match=r"does not fit the model: \d+ weights differ"):
        load_weights(other, tmp_path / "policy.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
