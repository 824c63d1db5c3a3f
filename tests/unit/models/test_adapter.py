"""Adapters: merged into the base they name, refused when the two do not fit."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moored.errors import MooredError
from moored.models.adapter import merge_adapter
from moored.models.find import base_name, check_model_name, embedded_models, weights_folder
from moored.models.load import load_model
from moored.models.rates import count_parameters

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A random LoRA adapter of `nano`."""
    return make_adapter(tmp_path_factory.mktemp("adapter"), "nano", ["q_proj", "down_proj"])


def make_adapter(folder: Path, base: str, targets: list[str], **options: object) -> Path:
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(load_model(base, CPU).model, lora).save_pretrained(folder)
    name_base(folder, base)
    return folder


def changed_nano(folder: Path, **values: object) -> str:
    """A random model like `nano`, with other values in its configuration."""
    shutil.copytree(embedded_models()["nano"], folder)
    config = transformers.AutoConfig.from_pretrained(folder, **values)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8)[None]).logits


def load(name: str) -> None:
    load_model(name, CPU)


def merge(name: str) -> None:
    """Without what is known beforehand: a base may be a hub id."""
    base = base_name(Path(name))
    merge_adapter(load_model(base, CPU).model, Path(name), base)


def name_base(folder: Path, base: str | None) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))


def copied(adapter: Path, folder: Path, base: str | None) -> Path:
    for file in adapter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    name_base(folder, base)
    return folder


def test_an_adapter_is_merged_into_its_base(adapter):
    check_model_name(str(adapter))
    base, merged = (load_model(name, CPU) for name in ("nano", str(adapter)))
    assert type(merged.model) is type(base.model)
    before, after = base.model.state_dict(), merged.model.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed and all("q_proj" in name or "down_proj" in name for name in changed)
    assert len(merged.tokenizer) == len(base.tokenizer)


def test_all_weights_of_a_merged_adapter_can_be_trained(adapter):
    assert all(weight.requires_grad for weight in load_model(str(adapter), CPU).model.parameters())


def test_size_and_place_are_those_of_the_base(adapter):
    assert weights_folder(str(adapter)) == embedded_models()["nano"]
    assert count_parameters(str(adapter)) == count_parameters("nano")


def test_a_base_of_other_shapes_is_refused(adapter, tmp_path):
    with pytest.raises(MooredError, match="does not fit its base") as caught:
        load(str(copied(adapter, tmp_path, "mini")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (None, "base_model_name_or_path"),
        ("nanoo", "did you mean 'nano'"),
    ],
)
def test_a_base_that_is_missing_or_misspelt_is_refused(adapter, tmp_path, base, why):
    with pytest.raises(MooredError, match=why):
        check_model_name(str(copied(adapter, tmp_path, base)))


def test_an_adapter_of_an_adapter_is_refused(adapter, tmp_path):
    for base in (str(adapter), str(tmp_path)):
        with pytest.raises(MooredError, match="itself an adapter"):
            check_model_name(str(copied(adapter, tmp_path, base)))


def test_damaged_weights_are_refused(adapter, tmp_path):
    folder = copied(adapter, tmp_path, "nano")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MooredError, match="cannot be loaded"):
        load(str(folder))


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["q_proj", "embed_tokens"], {}),
        (["lm_head"], {}),
        (["q_proj"], {"modules_to_save": ["lm_head"]}),
        (["q_proj"], {"modules_to_save": ["embed_tokens"]}),
    ],
)
def test_an_adapter_of_a_tied_embedding_is_refused(tmp_path, targets, options, recwarn):
    folder = make_adapter(tmp_path, "nano", targets, **options)
    for refused in (load, merge):
        with pytest.raises(MooredError, match="tie_word_embeddings") as raised:
            refused(str(folder))
        assert "\n" not in str(raised.value)
    assert not [str(warning.message) for warning in recwarn if warning.category is UserWarning]


@pytest.mark.parametrize(
    ("is_tied", "targets", "options"),
    [
        (False, ["q_proj", "embed_tokens"], {}),
        (False, ["lm_head"], {}),
        (False, ["q_proj"], {"modules_to_save": ["lm_head"]}),
        (True, ["q_proj"], {"trainable_token_indices": [3, 5]}),
        (True, ["q_proj"], {"modules_to_save": ["norm"]}),
        (True, ["q_proj"], {"use_dora": True}),
    ],
)
def test_a_merged_model_computes_what_base_and_adapter_do(tmp_path, is_tied, targets, options):
    base = changed_nano(tmp_path / "base", tie_word_embeddings=is_tied)
    folder = make_adapter(tmp_path / "adapter", base, targets, **options)
    own = peft.PeftModel.from_pretrained(load_model(base, CPU).model, folder)
    merged: Any = load_model(str(folder), CPU).model
    ends = (merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
    assert (ends[0] is ends[1]) == is_tied
    assert not torch.allclose(logits(merged), logits(load_model(base, CPU).model), atol=1e-3)
    torch.testing.assert_close(logits(merged), logits(own), rtol=1e-4, atol=1e-4)


def test_a_whole_model_beside_an_adapter_is_refused(adapter, tmp_path):
    shutil.copytree(embedded_models()["nano"], tmp_path, dirs_exist_ok=True)
    copied(adapter, tmp_path, "nano")
    with pytest.raises(MooredError, match="both a whole model and an adapter"):
        check_model_name(str(tmp_path))


def test_an_adapter_that_comes_with_config_and_tokenizer_is_an_adapter(adapter, tmp_path):
    copied(adapter, tmp_path, "nano")
    for file in embedded_models()["nano"].iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path)
    folders = (str(tmp_path), str(adapter))
    both = [load_model(folder, CPU).model.state_dict() for folder in folders]
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())


def test_weights_of_an_adapter_are_no_weights_of_a_model(adapter, tmp_path):
    shutil.copytree(embedded_models()["nano"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(adapter / "adapter_model.safetensors", tmp_path)
    with pytest.raises(MooredError, match="cannot be loaded"):
        load(str(tmp_path))


def test_a_base_with_more_layers_is_refused(adapter, tmp_path, recwarn):
    base = changed_nano(tmp_path / "base", num_hidden_layers=6)
    (tmp_path / "adapter").mkdir()
    folder = copied(adapter, tmp_path / "adapter", base)
    for refused in (load, merge):
        with pytest.raises(MooredError, match="more layers"):
            refused(str(folder))
    assert not [str(warning.message) for warning in recwarn if warning.category is UserWarning]


def test_an_adapter_with_a_larger_vocabulary_is_refused(tmp_path):
    larger, base = (
        changed_nano(tmp_path / str(size), vocab_size=size, tie_word_embeddings=False)
        for size in (1030, 1024)
    )
    folder = make_adapter(tmp_path / "adapter", larger, ["q_proj"], modules_to_save=["lm_head"])
    check_model_name(str(folder))
    name_base(folder, base)
    for refused in (load, merge):
        with pytest.raises(MooredError, match=r"'lm_head.*another shape"):
            refused(str(folder))


def test_learned_prompts_are_refused(tmp_path):
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(load_model("nano", CPU).model, prompts)
    model.save_pretrained(tmp_path)
    name_base(tmp_path, "nano")
    for refused in (load, merge):
        with pytest.raises(MooredError, match="LoRA"):
            refused(str(tmp_path))


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["q_proj"], {"layers_to_transform": [0, 2]}),
        (["q_proj"], {"layers_to_transform": 0}),
        (["q_proj"], {"exclude_modules": ["model.layers.1.self_attn.q_proj"]}),
        (["q_proj"], {"modules_to_save": ["layers.1.self_attn.q_proj"]}),
        (["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"], {}),
        (["model.layers.1.self_attn.q_proj"], {}),
    ],
)
def test_an_adapter_of_some_layers_is_taken(tmp_path, targets, options):
    folder = make_adapter(tmp_path, "nano", targets, **options)
    check_model_name(str(folder))
    assert load_model(str(folder), CPU)


def test_a_layer_that_is_named_does_not_hide_that_others_are_missing(tmp_path):
    base = changed_nano(tmp_path / "base", num_hidden_layers=6)
    folder = make_adapter(tmp_path / "own", "nano", ["layers.0.self_attn.k_proj", "q_proj"])
    name_base(folder, base)
    with pytest.raises(MooredError, match="more layers"):
        merge(str(folder))


@pytest.mark.parametrize("num_layers", [5, 4])
def test_a_base_in_the_format_of_torch_is_compared_too(adapter, tmp_path, num_layers):
    base = Path(changed_nano(tmp_path / "base", num_hidden_layers=num_layers))
    weights = load_file(base / "model.safetensors")
    torch.save(weights, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    (tmp_path / "adapter").mkdir()
    folder = str(copied(adapter, tmp_path / "adapter", str(base)))
    if num_layers == 5:
        assert load_model(folder, CPU)
        return
    with pytest.raises(MooredError, match=r"'model\.layers\.4"):
        load_model(folder, CPU)


def test_a_base_whose_files_name_layers_without_the_whole_is_accepted(tmp_path):
    config = transformers.GPT2Config(vocab_size=1024, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    base = Path(shutil.copytree(embedded_models()["nano"], tmp_path / "base"))
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(base)
    short = {name: tensor.contiguous() for name, tensor in model.transformer.state_dict().items()}
    save_file(short, base / "model.safetensors", metadata={"format": "pt"})
    folder = make_adapter(tmp_path / "adapter", str(base), ["c_attn"], fan_in_fan_out=True)
    assert load_model(str(folder), CPU)


def test_a_base_that_is_gone_is_named_with_its_adapter(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "own").mkdir(parents=True)
    copied(adapter, tmp_path / "m" / "own", "m/gone")
    with pytest.raises(MooredError, match="'m/gone'") as raised:
        load_model("m/own", CPU)
    assert "huggingface.co" not in str(raised.value)


@pytest.fixture
def project(adapter, tmp_path, monkeypatch) -> Path:
    """A folder with a base and an adapter that names it by the path from there."""
    folder = tmp_path / "project"
    shutil.copytree(embedded_models()["nano"], folder / "models" / "base")
    (folder / "runs" / "own").mkdir(parents=True)
    copied(adapter, folder / "runs" / "own", "models/base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_a_base_by_a_relative_path_is_found_from_another_folder(project, monkeypatch):
    own = str(project / "runs" / "own")
    assert weights_folder(own) == project / "models" / "base"
    assert count_parameters("../project/runs/own") == count_parameters("nano")
    check_model_name(own)
    assert load_model(own, CPU)
    monkeypatch.chdir(project)
    assert base_name(Path("runs/own")) == "models/base"


def test_a_base_by_a_relative_path_is_found_where_both_were_moved(project, tmp_path):
    project.rename(tmp_path / "moved")
    assert base_name(tmp_path / "moved/runs/own") == str(tmp_path / "moved/models/base")


def test_a_base_in_the_current_folder_is_taken_where_none_lies_near_the_adapter(project):
    shutil.move(project / "models", "models")
    assert base_name(project / "runs" / "own") == "models/base"


def test_a_folder_without_a_model_here_is_not_taken_for_the_base(project):
    Path("models/base").mkdir(parents=True)
    assert base_name(project / "runs" / "own") == str(project / "models" / "base")


def test_where_a_base_was_looked_for_is_said(project):
    name_base(project / "runs" / "own", "./models/gone")
    with pytest.raises(MooredError, match="looked for"):
        check_model_name(str(project / "runs" / "own"))
