"""A model folder that cannot be loaded is refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from moored.engine.device import pick_device
from moored.errors import MooredError
from moored.models.find import check_model_name, embedded_models
from moored.models.folder import has_plain_tokenizer
from moored.models.load import load_model, load_tokenizer
from moored.rollout.render import Renderer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of `nano`."""
    return Path(shutil.copytree(embedded_models()["nano"], tmp_path / "copy"))


def edit_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def load(name: str | Path) -> None:
    load_model(str(name), torch.device("cpu"))


@pytest.mark.parametrize("size", [100_000, 100, 0])
def test_truncated_weights_are_one_sentence(folder, size):
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(MooredError, match="header") as raised:
        load(folder)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_says_which(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(MooredError, match=missing):
        load(folder)


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(MooredError, match=r"model-2\.safetensors"):
        load(folder)


def test_an_empty_folder_is_called_empty(tmp_path):
    with pytest.raises(MooredError, match="empty"):
        check_model_name(str(tmp_path))


def test_a_broken_config_is_named(folder):
    (folder / "config.json").write_text('{"model_type":')
    with pytest.raises(MooredError, match=r"config\.json"):
        check_model_name(str(folder))


def test_a_run_directory_in_place_of_a_model_names_the_model_of_the_run(tmp_path, folder):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(MooredError, match="no model yet"):
        check_model_name(str(run))
    with pytest.raises(MooredError, match=r"folder of runs.*/a'"):
        check_model_name(str(run.parent))
    folder.rename(run / "model")
    with pytest.raises(MooredError, match=r"give its model: '.*/runs/a/model'"):
        check_model_name(str(run))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nanno", "did you mean 'nano'"),
        ("runs/nope", "no folder 'runs/nope'"),
        ("mine/bettle", "did you mean 'bottle'"),
        ("young/model", "no folder 'young/model'"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("./models/x", "no folder './models/x'"),
        ("notes.txt", "is a file"),
    ],
)
def test_a_misspelt_folder_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "mine" / "bottle").mkdir(parents=True)
    (tmp_path / "mine" / "bottle" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(MooredError, match=message):
        check_model_name(name)


def test_a_hub_id_passes_without_a_look_at_the_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_model_name("Qwen/Qwen2.5-0.5B-Instruct")


def test_a_hub_id_that_was_downloaded_passes_beside_a_folder_of_its_first_part(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-1.5B-Instruct").mkdir(parents=True)
    check_model_name("Qwen/Qwen2.5-0.5B-Instruct")
    (tmp_path / "Qwen" / "Qwen2.5-1.5B-Instruct" / "config.json").write_text("{}")
    with pytest.raises(MooredError, match="did you mean"):
        check_model_name("Qwen/Qwen2.5-0.5B-Instruct")
    monkeypatch.setattr("moored.models.find.downloaded_folder", lambda name: tmp_path)
    check_model_name("Qwen/Qwen2.5-0.5B-Instruct")


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_a_device_that_torch_lacks_here_is_refused(name, monkeypatch):
    def fail(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError(f"PyTorch is not linked with support for {name} devices")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(MooredError, match="device"):
        pick_device(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "frob"}, "upgrade transformers"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"hidden_size": 64}, "other shapes"),
        ({"num_hidden_layers": 9}, r"lack \d+ tensors"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence_and_nothing_else(
    folder, values, message, capfd, caplog
):
    edit_json(folder / "config.json", **values)
    with pytest.raises(MooredError, match=message) as raised:
        load_model(str(folder), torch.device("cpu"))
    assert "\n" not in str(raised.value)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("tokenizer_config.json", "[]", r"\w+Error: "),
        ("tokenizer.json", "{}", "KeyError: 'added_tokens'"),
    ],
)
def test_a_tokenizer_file_of_another_form_is_one_sentence(folder, file, text, error):
    (folder / file).write_text(text)
    with pytest.raises(MooredError, match=error) as raised:
        load_model(str(folder), torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_quantized_weights_without_what_reads_them_say_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", bool)
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(MooredError, match="optimum"):
        load_model(str(folder), torch.device("cpu"))


def test_a_missing_chat_template_says_where_to_put_one(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_model(str(folder), torch.device("cpu")).tokenizer
    with pytest.raises(MooredError, match=r"chat_template\.jinja"):
        Renderer(tokenizer)


@pytest.mark.parametrize("name", embedded_models())
def test_a_plain_tokenizer_is_the_one_that_transformers_finds_by_itself(name, tmp_path):
    from transformers import AutoTokenizer

    source = embedded_models()[name]
    found = load_tokenizer(name)
    expected = AutoTokenizer.from_pretrained(source, local_files_only=True)
    assert has_plain_tokenizer(source)
    assert type(found) is type(expected) and found.init_kwargs == expected.init_kwargs
    for tokenizer, folder in ((found, "found"), (expected, "expected")):
        tokenizer.save_pretrained(tmp_path / folder)
    files = [file.name for file in (tmp_path / "expected").iterdir()]
    assert len(files) > 1
    for file in files:
        texts = [(tmp_path / folder / file).read_text() for folder in ("found", "expected")]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"model_type": "qwen2"}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}),
    ],
)
def test_any_other_tokenizer_is_left_to_transformers(folder, file, values):
    edit_json(folder / file, **values)
    assert not has_plain_tokenizer(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_no_tokenizer_is_plain_without_its_files(folder, file):
    (folder / file).unlink()
    assert not has_plain_tokenizer(folder)
