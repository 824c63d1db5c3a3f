"""Parameters are counted exactly, from a config.json or the table."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from moored.errors import MooredError
from moored.models.known import KNOWN, POSITIONS, known_facts
from moored.models.lengths import position_limit
from moored.models.rates import count_parameters
from moored.models.shapes import FAMILIES, description_of, shape_from_config, shape_of
from tests.tiny_model import tiny_model
from tests.unit.plan.tiny import tiny

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


@pytest.fixture
def no_downloads(monkeypatch) -> None:
    """As on a machine that never downloaded a model."""
    monkeypatch.setattr("moored.models.find.downloaded_folder", lambda name: None)


def test_parameters_of_a_tiny_model_by_hand():
    # Attention 4 x (4 + 2 + 2) + 4 x 4 = 48, linear units 3 x 4 x 8 = 96, two norms 8: 152 a layer.
    assert tiny().layer_parameters == 152
    # Two of them, the last norm 4, the embedding 10 x 4.
    assert tiny().num_parameters == tiny().trunk_parameters == 348
    assert tiny(is_tied=False).num_parameters == 388
    assert tiny(is_tied=False).trunk_parameters == 348
    # q, k and v have 4 + 2 + 2 biases.
    assert tiny(has_qkv_bias=True).layer_parameters == 160
    # A norm of 2 for the queries of a head, and one for its keys.
    assert tiny(qk_norm="head").layer_parameters == 156


def test_adapters_and_cache_of_a_tiny_model_by_hand():
    # Inputs and outputs of q 8, k 6, v 6, out 8, gate, up and down 12 each: 64 a layer and rank.
    assert tiny().adapter_parameters(3) == 2 * 3 * 64
    # Keys and values of 2 numbers in 2 layers, 2 bytes each.
    assert tiny().cache_bytes(2) == 2 * 2 * 2 * 2


@pytest.mark.parametrize(("model", "count"), PUBLISHED.items())
def test_the_table_has_as_many_parameters_as_the_hub_says(model, count):
    assert shape_of(model).num_parameters == count


@pytest.mark.parametrize("model", KNOWN)
def test_the_table_has_as_many_parameters_as_transformers_makes(model):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    facts = asdict(KNOWN[model])
    kind = transformers.AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(kind)
    assert shape_of(model).num_parameters == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_family_is_counted_from_its_config_as_transformers_makes_it(family, is_tied):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    sizes |= {"head_dim": 16} if FAMILIES[family].head_width else {}
    kind = transformers.AutoConfig.for_model(family, **sizes, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(kind)
    shape = shape_from_config(kind.to_dict(), family)
    assert shape.num_parameters == sum(p.numel() for p in made.parameters())
    trunk = made.get_decoder()
    assert shape.trunk_parameters == sum(p.numel() for p in trunk.parameters())


def test_adapters_are_as_many_as_peft_makes():
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen2")
    kind = model.config.to_dict()
    options = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    made = peft.get_peft_model(model, options)
    trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert shape_from_config(kind, "tiny").adapter_parameters(3) == trained


def test_embedded_models_and_smollm2_are_read_without_their_weights():
    assert shape_of("nano").num_parameters == count_parameters("nano")
    assert shape_of("mini").num_parameters == count_parameters("mini")
    assert shape_of("smollm2").num_parameters == 134_515_008


def test_a_variant_has_the_shape_of_its_base():
    assert known_facts("qwen/qwen3-8b-base") == KNOWN["Qwen/Qwen3-8B"]
    assert known_facts("Qwen/Qwen2.5-9B") is None


@pytest.mark.parametrize("model", POSITIONS)
def test_every_model_whose_positions_are_known_has_a_shape(model, no_downloads):
    assert known_facts(model) is not None
    assert position_limit(description_of(model)) == POSITIONS[model]


def test_variants_of_a_shape_may_be_made_for_other_lengths(no_downloads):
    """Qwen2.5-7B reads 131,072 tokens, and its `-Instruct` 32,768."""
    assert position_limit(description_of("Qwen/Qwen2.5-7B-Instruct")) == 32768
    assert position_limit(description_of("Qwen/Qwen2.5-7B")) is None


def test_what_is_here_of_a_model_comes_before_the_table(tmp_path, no_downloads):
    adapter = {"base_model_name_or_path": "Qwen/Qwen3-8B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    assert position_limit(description_of(str(tmp_path))) == 40960
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (tmp_path / "model.safetensors").touch()  # with weights of its own it is no adapter
    assert description_of(str(tmp_path)) == {"max_position_embeddings": 512}
    assert position_limit(description_of("smollm2")) == 8192
    assert description_of("org/name") == {}


def test_weights_of_another_size_are_not_planned_as_bfloat16():
    config = asdict(KNOWN["Qwen/Qwen2.5-0.5B"])
    assert shape_from_config({**config, "quantization_config": None}, "x").layers == 24
    with pytest.raises(MooredError, match="model 'x' is quantised, which is not planned"):
        shape_from_config({**config, "quantization_config": {"quant_method": "gptq"}}, "x")


def test_the_fast_sampler_takes_the_shapes_it_knows():
    config = asdict(KNOWN["Qwen/Qwen2.5-0.5B"])
    assert shape_from_config(config, "x").is_fast
    assert not shape_from_config({**config, "head_dim": 80}, "x").is_fast
    assert not shape_from_config({**config, "model_type": "olmo2"}, "x").is_fast
    dynamic = {**config, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert not shape_from_config(dynamic, "x").is_fast
    # Only a window that is used counts.
    windowed = {**config, "sliding_window": 4096, "use_sliding_window": False}
    assert shape_from_config(windowed, "x").is_fast
    assert not shape_from_config({**windowed, "use_sliding_window": True}, "x").is_fast


def test_what_is_not_known_is_refused_with_the_reason(tmp_path):
    with pytest.raises(MooredError, match=r"'x' is a mixture of experts \('qwen3_moe'\), which"):
        shape_from_config({"model_type": "qwen3_moe", "num_experts": 8}, "x")
    with pytest.raises(MooredError, match="'x' is of type 'gpt2', whose memory is not known"):
        shape_from_config({"model_type": "gpt2"}, "x")
    with pytest.raises(MooredError, match="has num_attention_heads = None; give a whole number"):
        shape_from_config({"model_type": "llama"}, "x")
    with pytest.raises(MooredError, match="has vocab_size = 'many'; give a whole number above 0"):
        shape_from_config({**asdict(KNOWN["Qwen/Qwen3-4B"]), "vocab_size": "many"}, "x")
    with pytest.raises(MooredError, match="'org/name' is not in the table, and plans download"):
        shape_of("org/name")


def test_a_folder_is_read_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(asdict(KNOWN["Qwen/Qwen2.5-3B"])))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert shape_of(str(tmp_path)) == shape_of("Qwen/Qwen2.5-3B-Instruct")
