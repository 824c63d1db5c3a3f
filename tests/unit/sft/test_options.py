"""Options of a warm start: refused in one sentence, or settled by the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moored.config import load_config
from moored.config_engine import Section
from moored.errors import ConfigError
from moored.sft.options import (
    SftConfig,
    dump_sft_config,
    engine_config,
    load_sft_config,
    settle,
)
from tests.tiny_model import tiny_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "there is nothing to learn from; give env=NAME or dialogues=FILE"),
        ({"env": "bandit", "num_step": 3}, "unknown option 'num_step'; did you mean 'num_steps'?"),
        ({"env": "bandit", "lr": 1.0}, "unknown option 'lr'; did you mean 'optimizer.lr'?"),
        ({"env": "bandit", "num_steps": 0}, "num_steps = 0: input should be greater than"),
        ({"env": "bandit", "workers": 1000}, "workers = 1000: input should be less than or equal"),
        # The first step of such a run never ended.
        ({"env": "bandit", "batch_tokens": 10**9}, "batch_tokens = 1000000000: input should be le"),
        ({"env": "bandit", "demonstrations": {"noise": 2}}, "demonstrations.noise = 2"),
        ({"env": "bandit", "engine": {"kind": "endpoint"}}, "an endpoint cannot be trained"),
    ],
)
def test_a_wrong_option_is_explained(data, why):
    with pytest.raises(ConfigError) as caught:
        load_sft_config(data)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_context_longer_than_the_models_is_refused_and_a_shorter_model_sets_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 640}))
    model = {"model": str(tmp_path), "env": "bandit"}
    assert settle(load_sft_config(model)).max_context == 640
    assert settle(load_sft_config({**model, "max_context": 100})).max_context == 100
    assert settle(load_sft_config({"env": "bandit"})).max_context == 2048
    with pytest.raises(ConfigError, match="max_context = 641 is longer than the 640 tokens"):
        settle(load_sft_config({**model, "max_context": 641}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 512}))
    assert settle(load_sft_config(model)).max_context == 512


def test_a_window_shorter_than_the_usual_context_sets_it_too(tmp_path):
    described = {"max_position_embeddings": 4096, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = {"model": str(tmp_path), "env": "bandit"}
    assert settle(load_sft_config(model)).max_context == 512
    with pytest.raises(ConfigError, match=r"^max_context = 513 .* its layers look back; set it to"):
        settle(load_sft_config({**model, "max_context": 513}))


def test_a_context_longer_than_a_hub_id_of_the_table_was_made_for_is_refused(monkeypatch):
    monkeypatch.setattr("moored.models.find.downloaded_folder", lambda name: None)
    model = {"model": "HuggingFaceTB/SmolLM2-135M", "env": "bandit"}
    assert settle(load_sft_config({**model, "max_context": 8192})).max_context == 8192
    with pytest.raises(ConfigError, match="max_context = 8193 is longer than the 8192 tokens"):
        settle(load_sft_config({**model, "max_context": 8193}))


def test_a_model_with_scaled_angles_takes_longer_dialogues_than_it_says(tmp_path):
    described = {"max_position_embeddings": 640, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = {"env": "bandit", "model": str(tmp_path)}
    assert settle(load_sft_config({**model, "max_context": 1000})).max_context == 1000
    assert settle(load_sft_config(model)).max_context == 640


def test_the_episodes_of_an_evaluation_have_room_for_prompts_in_a_short_context():
    def reply_tokens(**options) -> int | None:
        return settle(load_sft_config({"env": "bandit", **options})).evaluation.max_response_tokens

    assert reply_tokens() == 400
    assert reply_tokens(max_context=512) == 256
    assert reply_tokens(max_context=512, evaluation={"max_response_tokens": 500}) == 500
    long = {"max_context": 512, "evaluation": {"max_response_tokens": 512}}
    with pytest.raises(ConfigError, match=r"= 512 leaves no room for a prompt in max_context = 5"):
        reply_tokens(**long)
    long["evaluation"]["num_tasks"] = 0
    assert reply_tokens(**long) == 512


@pytest.mark.parametrize(
    ("model", "lora_rank", "lr"),
    [
        ("nano", 0, 1e-3),
        ("nano", 8, 1e-3),
        ("smollm2", 0, 1e-4),
        ("smollm2", 8, 1e-3),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0, 1e-4),
        ("Qwen/Qwen2.5-1.5B-Instruct", 0, 1e-5),
        ("org/unknown", 0, 1e-5),
        ("org/unknown", 8, 1e-4),
    ],
)
def test_the_learning_rate_follows_the_size_of_the_model(model, lora_rank, lr):
    data = {"model": model, "env": "bandit", "optimizer": {"lora_rank": lora_rank}}
    assert settle(load_sft_config(data)).optimizer.lr == pytest.approx(lr)
    data["optimizer"]["lr"] = 0.5
    assert settle(load_sft_config(data)).optimizer.lr == 0.5


def test_a_folder_of_older_weights_is_sized_by_its_config(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    config = settle(load_sft_config({"model": str(tmp_path), "env": "bandit"}))
    assert config.optimizer.lr == pytest.approx(1e-3)


def test_what_is_written_reads_back_and_is_refused_by_other_commands(tmp_path):
    config = settle(load_sft_config({"env": ["bandit", {"name": "sokoban", "weight": 2}]}))
    file = tmp_path / "config.yaml"
    file.write_text(dump_sft_config(config))
    assert load_sft_config(file) == config
    with pytest.raises(
        ConfigError, match="belongs to a run of `moored sft`, not of `moored train`"
    ):
        load_config(file)


def test_the_engine_gets_what_the_options_say():
    data = {"env": "bandit", "optimizer": {"lora_rank": 4, "weight_decay": 0.1}, "max_context": 99}
    config = engine_config(settle(load_sft_config(data)))
    assert (config.optimizer.lora_rank, config.optimizer.weight_decay) == (4, 0.1)
    assert config.rollout.max_context == 99
    assert (config.algorithm.entropy_coef, config.algorithm.kl_coef) == (0.0, 0.0)


def test_every_option_is_documented_with_its_default():
    text = (ROOT / "docs" / "sft.md").read_text()
    config = load_sft_config({"env": "bandit"})
    for name, value in SftConfig.model_construct():
        own = {name: value} if not isinstance(value, Section) else {}
        if isinstance(value, Section) and name != "engine":
            own = {f"{name}.{key}": x for key, x in getattr(config, name)}
        for option, default in own.items():
            shown = "null" if default is None else default if default != [] else "none"
            row = rf"^\| `{option}` \| {re.escape(str(shown))} \|"
            assert re.search(row, text, re.M), f"{option} {shown}"
