"""Presets: what each is about, and that two of one kind do not silently replace each other."""

from __future__ import annotations

from typing import Any

import pytest

from moored.config import load_config
from moored.envs.mix import make_env
from moored.errors import ConfigError
from moored.models.find import check_model_name
from moored.models.rates import with_rates
from moored.presets import preset_kinds, read_presets

REAL_MODELS = ["llama-3.2-3b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"]


def test_the_kind_of_a_preset_follows_from_what_it_sets():
    kinds = preset_kinds()
    assert [name for name, kind in kinds.items() if kind == "environment"] == [
        *("bandit", "code", "countdown", "frozen_lake", "metamath", "search", "sokoban", "webshop")
    ]
    assert [kinds[name] for name in ("ppo", "grpo", "dr_grpo", "dapo")] == ["algorithm"] * 4
    assert [kinds[name] for name in ("no_filter", "trajectory_filter")] == ["filter"] * 2
    assert [kinds[name] for name in ("smoke", "collapse")] == ["run"] * 2
    assert [name for name, kind in kinds.items() if kind == "model"] == REAL_MODELS


@pytest.mark.parametrize(
    ("names", "kind", "advice"),
    [
        (["sokoban", "grpo", "frozen_lake"], "environment", "'env=[sokoban, frozen_lake]'"),
        (["sokoban", "grpo", "ppo"], "algorithm", "choose one of 'grpo' and 'ppo'"),
        (["no_filter", "trajectory_filter"], "filter", "choose one of 'no_filter' and 'traj"),
        (["qwen2.5-3b", "grpo", "llama-3.2-3b"], "model", "choose one of 'qwen2.5-3b' and 'llama"),
        (["collapse", "smoke"], "run", "choose one of 'collapse' and 'smoke'"),
    ],
)
def test_two_presets_of_one_kind_are_refused(names, kind, advice):
    with pytest.raises(ConfigError) as refused:
        read_presets(names)
    assert f"two presets are of the kind {kind!r}; " in str(refused.value)
    assert advice in str(refused.value)


def test_the_advice_on_mixing_environments_works():
    config = load_config(read_presets(["grpo"]), ["env=[sokoban, frozen_lake]"])
    assert [env.name for env in config.env] == ["sokoban", "frozen_lake"]


def test_the_preset_of_webshop_pays_the_score_and_the_environment_alone_full_ones_only():
    def dense(*overrides: str) -> bool:
        (spec,) = load_config(read_presets(["webshop", "grpo"]), list(overrides)).env
        env: Any = make_env(spec.name, **spec.options)
        return env.dense

    assert dense()
    assert not dense("env.0.options.dense=false")
    assert not dense("env=webshop")
    assert not dense("env={name: webshop, options: {num_products: 150}}")


def test_presets_of_several_kinds_and_files_are_laid_over_each_other(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("env: bandit\nalgorithm: {clip_low: 0.1}\n")
    config = load_config(read_presets(["smoke", "sokoban", "grpo", "no_filter", str(file)]))
    assert config.env[0].name == "bandit"
    assert (config.algorithm.name, config.algorithm.clip_low) == ("grpo", 0.1)
    assert config.filter.rule == "none"


def test_a_folder_in_place_of_a_file_is_called_one(tmp_path):
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"a\.yaml' is a folder; give a preset or a \.yaml file"):
        read_presets([str(tmp_path / "a.yaml")])
    (tmp_path / "a.yaml" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"did you mean '.*/a\.yaml/config\.yaml'"):
        read_presets([str(tmp_path / "a.yaml")])


def test_a_misspelt_file_is_not_called_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError) as refused:
        read_presets(["mien.yaml"])
    assert str(refused.value) == (
        "configuration file 'mien.yaml' does not exist; did you mean 'mine.yaml'?"
    )
    with pytest.raises(ConfigError, match=r"'no/thing.yaml' does not exist; check the path"):
        read_presets(["no/thing.yaml"])


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_has_the_papers_settings_under_every_algorithm(name, monkeypatch):
    monkeypatch.setattr("socket.socket", None)  # nothing is downloaded
    family, size = name.rsplit("-", 1)
    for algorithm in ("ppo", "grpo", "dapo"):
        config = with_rates(load_config(read_presets(["sokoban", algorithm, name])))
        check_model_name(config.model)
        assert family.partition("-")[0].lower() in config.model.lower()
        assert f"-{size}-instruct" in config.model.lower()
        assert (config.env[0].name, config.algorithm.name) == ("sokoban", algorithm)
        optimizer, rollout = config.optimizer, config.rollout
        assert (optimizer.lr, optimizer.critic_lr, optimizer.grad_clip) == (1e-6, 1e-5, 1.0)
        # 128 episodes in updates of 32, replies of up to 400 tokens.
        assert rollout.num_groups * rollout.group_size / optimizer.num_minibatches == 32
        assert rollout.max_response_tokens == 400
        # Five turns of prompt and reply.
        assert rollout.max_context >= 5 * 400 + 1000
