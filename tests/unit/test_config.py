"""Configuration: one default each, strict keys, errors that help."""

from __future__ import annotations

import inspect

import pytest
import yaml

from moored.algo import bilevel_gae, loss_scale, select_groups
from moored.config import Config, FilterConfig, dump_config, load_config
from moored.config_text import read_yaml
from moored.diagnostics import ZScoreEMA, first_turn_pairs, information
from moored.errors import ConfigError
from moored.sft.options import load_sft_config


def error_of(*overrides: str, source=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_defaults_load_and_match_the_method():
    config = load_config()
    assert (config.rollout.num_groups, config.rollout.group_size) == (8, 16)
    assert (config.filter.rule, config.filter.value) == ("top_p", 0.9)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)


@pytest.mark.parametrize(
    ("section", "function", "renamed"),
    [
        ("filter", select_groups, {}),
        ("filter", loss_scale, {"mode": "loss_scale"}),
        ("algorithm", bilevel_gae, {"lam_turn": None}),
        ("collapse", information, {"ks": None, "seed": None, "prompt_keys": None}),
        ("collapse", first_turn_pairs, {"seed": None}),
        ("collapse", ZScoreEMA, {"decay": "ema_decay"}),
    ],
)
def test_a_function_and_its_option_have_one_default(section, function, renamed):
    options = getattr(Config(), section)
    checked = 0
    for name, parameter in inspect.signature(function).parameters.items():
        option = renamed.get(name, name)
        if option is None or parameter.default in (inspect.Parameter.empty, None):
            continue
        assert getattr(options, option) == parameter.default, name
        checked += 1
    assert checked


def test_dotted_overrides_are_yaml_values():
    config = load_config(
        None,
        ["filter.value=0.8", "filter.keep_zero=true", "algorithm.kl_coef=1e-3", "seed=7"],
    )
    assert config.filter == FilterConfig(value=0.8, keep_zero=True)
    assert (config.algorithm.kl_coef, config.seed) == (0.001, 7)
    assert load_config(None, ["algorithm.dual_clip=null"]).algorithm.dual_clip is None


def test_overrides_reach_into_lists_and_come_after_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("filter: {value: 0.7}\nenv: [{name: sokoban, weight: 2}, {name: bandit}]\n")
    config = load_config(file, ["filter.value=0.6", "env.1.weight=3"])
    assert config.filter.value == 0.6
    assert [(e.name, e.weight) for e in config.env] == [("sokoban", 2), ("bandit", 3)]


@pytest.mark.parametrize("short", ["bandit", "[bandit]", "{name: bandit}", "[{name: bandit}]"])
def test_one_environment_may_be_written_short(short):
    assert [e.name for e in load_config(None, [f"env={short}"]).env] == ["bandit"]


@pytest.mark.parametrize("short", ["2048", "[2048]", "{name: 2048}", "[{name: 2048}]"])
def test_an_environment_may_be_called_a_number(short):
    assert [e.name for e in load_config(None, [f"env={short}"]).env] == ["2048"]
    assert [e.name for e in load_sft_config({}, [f"env={short}"]).env] == ["2048"]


def test_an_override_may_change_an_environment_called_a_number():
    config = load_config({"env": [2048, "sudoku"]}, ["env.0.weight=2"])
    assert [(e.name, e.weight) for e in config.env] == [("2048", 2.0), ("sudoku", 1.0)]


def test_a_file_of_another_command_is_named_in_one_short_sentence(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"command": "sft", "env": ["sudoku"]}))
    assert str(file) in error_of(source=file) and "moored sft" in error_of(source=file)
    assert "moored sft" in error_of(source=read_yaml(file))
    file.write_text(dump_config(load_config()))
    for source in (file, read_yaml(file)):
        with pytest.raises(ConfigError, match="moored train"):
            load_sft_config(source)


def test_the_dump_reads_back_to_the_same_configuration(tmp_path):
    config = load_config(None, ["env=[{name: sokoban, options: {boxes: 2}}]", "filter.value=0.8"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("filter.valeu=0.8", ["filter.valeu", "'value'"]),
        ("filtre.value=0.8", ["filtre", "'filter'"]),
        ("env=[{name: a}, {name: b, wieght: 2}]", ["env.1.wieght", "'weight'"]),
        ("device=cpu", ["'device'", "'engine.device'"]),
        ("optimizer.compile=true", ["'optimizer.compile'", "'engine.compile'"]),
        ("engine.url=x", ["'engine.endpoint.url'"]),
        ("algorithm.temperature=1", ["'rollout.temperature' or 'evaluation.temperature'"]),
        ("filter.value=lots", ["filter.value", "'lots'", "number"]),
        ("filter.rule=topp", ["filter.rule", "'top_p'"]),
        ("rollout.group_size=0", ["rollout.group_size = 0", "1"]),
        ("algorithm.kl_estimator=k1", ["algorithm.kl_estimator", "k3"]),
        ("engine.vllm.server=host:8000", ["engine.vllm.server", "https?://"]),
        ("filter=top_p", ["filter", "'top_p'"]),
        ("env=[]", ["env", "1 item"]),
        ("env=[{weight: 1}]", ["env.0.name", "required"]),
        ("env=[{name: sokoban, weight: .inf}]", ["env.0.weight = inf", "finite"]),
        ("env=", ["env.0.name", "string"]),
        ("env=[true]", ["env.0.name = True", "string"]),
        ("filter.value", ["section.option=value"]),
        ("=3", ["section.option=value"]),
        ("filter.value=[", ["filter.value=[", "YAML"]),
        ("filter.value.deep=1", ["filter.value"]),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(override, parts):
    message = error_of(override)
    for part in parts:
        assert part in message


def test_several_mistakes_are_reported_together():
    message = error_of("filter.valeu=1", "sed=3")
    assert "filter.valeu" in message and "did you mean 'seed'" in message


def test_files_that_cannot_be_used_say_why(tmp_path):
    assert "No such file" in error_of(source=tmp_path / "absent.yaml")
    file = tmp_path / "bad.yaml"
    for content in (b"", b"- 1", b"a: [\nx: }", b"\xff\xfe", b"seed: 1\nrollout:\n\tseed: 2\n"):
        file.write_bytes(content)
        assert str(file) in error_of(source=file)
        assert "\n" not in error_of(source=file)
    assert "line 3" in error_of(source=file)


def test_list_positions_are_checked():
    assert "list of 1" in error_of("env.3.weight=1", source={"env": [{"name": "bandit"}]})


def test_sections_cannot_be_changed_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        load_config().filter.value = 0.5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("source", "overrides", "weights"),
    [
        (None, ["env.0.weight=2"], {"sokoban": 2}),
        ({"env": "bandit"}, ["env.0.weight=2"], {"bandit": 2}),
        ({"env": {"name": "bandit"}}, ["env.0.weight=2"], {"bandit": 2}),
        ({"env": ["bandit", "sokoban"]}, ["env.1.weight=2"], {"bandit": 1, "sokoban": 2}),
        (None, ["env=bandit", "env.0.weight=2"], {"bandit": 2}),
        (None, ["env=[bandit, sokoban]", "env.0.weight=3"], {"bandit": 3, "sokoban": 1}),
    ],
)
def test_overrides_reach_into_defaults_and_short_forms(source, overrides, weights):
    assert {e.name: e.weight for e in load_config(source, overrides).env} == weights


def test_overrides_inside_defaults_leave_the_rest_of_them():
    config = load_config(None, ["env.0.options.num_boxes=2", "collapse.views.1=chain"])
    assert (config.env[0].name, config.env[0].options) == ("sokoban", {"num_boxes": 2})
    assert config.collapse.views == ["first_turn", "chain", "episode_swap", "trajectory"]
    assert load_config(None, ["filter.value=0.8"]).filter == FilterConfig(value=0.8)
    assert load_config({"filter": {"rule": "top_k"}}, ["filter.value=0.5"]).filter.rule == "top_k"
    assert load_config() == Config()  # and the defaults themselves stay as they were


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["collapse.num_prompts=9", "collapse.num_pairs=8"], ["collapse.num_prompts = 9"]),
        (["rollout.num_groups=65"], ["collapse.num_pairs = 64", "rollout.num_groups"]),
    ],
)
def test_every_prompt_of_the_first_turn_view_needs_a_pair(overrides, parts):
    message = error_of(*overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "remedy",
    [
        "collapse.num_pairs=65",
        "collapse.num_prompts=64",
        "collapse.every=0",
        "collapse.views=[chain]",
    ],
)
def test_more_groups_than_pairs_are_fine_when_the_view_does_not_need_them(remedy):
    assert load_config(None, ["rollout.num_groups=65", remedy]).rollout.num_groups == 65
