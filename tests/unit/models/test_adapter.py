"""Adapters: merged into the base they name, refused when the two do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.errors import MooredError
from moored.models.load import check_model_name, embedded_models, load_model, weights_folder
from moored.models.rates import count_parameters

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A random LoRA adapter of `nano`."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(load_model("nano", CPU).model, lora).save_pretrained(folder)
    name_base(folder, "nano")
    return folder


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
    with pytest.raises(MooredError) as caught:
        check_model_name(str(copied(adapter, tmp_path, "mini")))
    text = str(caught.value)
    assert "does not fit its base" in text and text.count("\n") == 0
    # Down from 384 to 128 in nano, from 768 to 256 in mini.
    assert "down_proj' of 128 x 384, the base has 256 x 768" in text


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (None, "does not say what it was trained on"),
        ("nanoo", "the base of adapter .* cannot be used: .* mean 'nano'?"),
    ],
)
def test_a_base_that_is_missing_or_misspelt_is_refused(adapter, tmp_path, base, why):
    with pytest.raises(MooredError, match=why.replace("?", r"\?")):
        check_model_name(str(copied(adapter, tmp_path, base)))


def test_an_adapter_of_an_adapter_is_refused(adapter, tmp_path):
    for base in (str(adapter), str(tmp_path)):
        with pytest.raises(MooredError, match="is itself an adapter; merge that one first"):
            check_model_name(str(copied(adapter, tmp_path, base)))


def test_damaged_weights_are_refused(adapter, tmp_path):
    folder = copied(adapter, tmp_path, "nano")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MooredError, match=r"adapter_model\.safetensors is missing or damaged"):
        check_model_name(str(folder))
