"""Defaults that follow the algorithm, and options that must fit each other."""

from __future__ import annotations

import pytest

from moored.config import AlgorithmConfig, Config, FilterConfig, dump_config, load_config
from moored.errors import ConfigError
from moored.presets import preset_kinds, read_presets


def test_dapo_by_name_alone_is_dapo():
    config = load_config({}, ["algorithm.name=dapo"])
    chosen, filtered = config.algorithm, config.filter
    assert (chosen.clip_low, chosen.clip_high, chosen.kl_coef) == (0.2, 0.28, 0.0)
    assert chosen.entropy_coef == 0.0 and chosen.aggregation is None
    # Dynamic sampling: groups of equal rewards are replaced.
    assert (filtered.score, filtered.rule, filtered.action) == ("std", "nonzero", "refill")
    # A fifth of the longest reply.
    assert chosen.overlong_buffer == 80
    short = load_config({}, ["algorithm.name=dapo", "rollout.max_response_tokens=50"])
    assert short.algorithm.overlong_buffer == 10


def test_what_is_set_wins_over_what_a_name_stands_for():
    given = {"algorithm": {"name": "dapo", "entropy_coef": 0.02, "overlong_buffer": 0}}
    config = load_config(given, ["filter.max_refills=2"])
    assert (config.algorithm.entropy_coef, config.algorithm.overlong_buffer) == (0.02, 0)
    assert (config.filter.rule, config.filter.max_refills) == ("nonzero", 2)


def test_another_rule_replaces_dynamic_sampling_as_a_whole():
    config = load_config({"algorithm": {"name": "dapo"}}, ["filter.rule=top_p"])
    assert config.filter == FilterConfig(rule="top_p")


def test_gspo_has_the_clip_range_of_its_paper():
    chosen = load_config({}, ["algorithm.name=gspo"]).algorithm
    assert (chosen.clip_low, chosen.clip_high) == (3e-4, 4e-4)


def test_a_name_means_the_same_in_python_as_in_a_file():
    built = Config(algorithm=AlgorithmConfig(name="dapo", entropy_coef=0.5))
    assert built == load_config({"algorithm": {"name": "dapo", "entropy_coef": 0.5}})


def test_a_preset_of_an_algorithm_is_its_name():
    names = [name for name, kind in preset_kinds().items() if kind == "algorithm"]
    assert set(names) >= {"ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp"}
    for name in names:
        more = ["algorithm.bootstrap_truncated=false"] if name == "ppo" else []
        named = load_config({}, [f"algorithm.name={name}", *more])
        assert load_config(read_presets([name])) == named


def test_the_preset_ppo_ends_cut_episodes_as_the_papers_code_does_and_the_name_alone_does_not():
    assert not load_config(read_presets(["ppo"])).algorithm.bootstrap_truncated
    assert load_config({}, ["algorithm.name=ppo"]).algorithm.bootstrap_truncated
    assert load_config({}).algorithm.bootstrap_truncated


@pytest.mark.parametrize("name", ["cispo", "dapo", "grpo", "gspo", "ppo"])
def test_the_dump_holds_every_default_of_a_name_and_reads_back(name: str, tmp_path):
    config = load_config({}, [f"algorithm.name={name}"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_groups_of_one_are_refused_where_something_compares_them():
    with pytest.raises(ConfigError, match=r"filter\.rule=none"):
        load_config({}, ["rollout.group_size=1"])
    alone = ["rollout.group_size=1", "filter.rule=none"]
    for advantage in ("algorithm.name=rloo", "algorithm.advantage=dr_grpo"):
        with pytest.raises(ConfigError, match="compares the trajectories"):
            load_config({}, [*alone, advantage])
    assert load_config({}, alone).rollout.group_size == 1
    assert load_config({}, [*alone, "algorithm.name=reinforce_pp"]).rollout.group_size == 1
    assert load_config({}, ["rollout.group_size=1", "filter.score=mine:score"]).filter.value == 0.9


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["filter.value=2"], "share of the total"),
        (["filter.rule=top_k", "filter.value=4"], "top_k_count"),
        (["algorithm.importance_cap=2"], "old_logprobs=learner"),
        (["gradients.every=1", "gradients.params=lora"], "lora_rank"),
    ],
)
def test_what_would_do_nothing_is_refused_with_a_remedy(words, remedy):
    with pytest.raises(ConfigError, match=remedy):
        load_config({}, words)


def test_a_threshold_to_stop_at_may_be_given_without_its_patience():
    stop = load_config({"stop": {"min_success": [0.2, 3]}}, ["stop.low_variance=0"]).stop
    assert (stop.low_variance, stop.min_success) == ((0.0, 10), (0.2, 3))
    assert load_config({}, ["stop.low_variance.1=4"]).stop.low_variance == (0.1, 4)
    with pytest.raises(ConfigError, match=r"stop\.low_variance"):
        load_config({}, ["stop.low_variance=[0.1, 0]"])


def test_a_lag_needs_an_engine_whose_samplers_have_their_own_weights():
    with pytest.raises(ConfigError, match=r"engine\.kind=ray"):
        load_config({}, ["rollout.max_lag=1"])
    assert load_config({}, ["rollout.max_lag=1", "engine.kind=ray"]).rollout.max_lag == 1
    assert load_config({}, ["rollout.max_lag=1", "engine.kind=my:engine"]).rollout.max_lag == 1
