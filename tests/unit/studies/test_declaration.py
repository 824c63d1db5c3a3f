"""Studies as YAML: what they mean, and mistakes that are refused."""

from __future__ import annotations

import re

import pytest

from moored.errors import ConfigError, MooredError
from moored.runlog.changes import flat_options
from moored.studies.declaration import parse_seeds, plan_runs, read_study, restricted, study_names

GOOD = """question: Does it work?
base: [smoke, num_steps=3]
factors:
  filter:
    none: [filter.rule=none]
    0.9: [filter.value=0.9]
  algorithm:
    grpo: [grpo]
    ppo: ppo algorithm.lam=0.9
against: {filter: none}
seeds: 2
"""


def test_every_combination_of_arms_is_run_with_every_seed(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    runs = plan_runs(read_study(str(tmp_path / "mine.yaml")), ["num_steps=7"])
    assert [run.name for run in runs] == [
        f"{rule}/{algorithm}/seed-{seed}"
        for rule in ("none", "0.9")
        for algorithm in ("grpo", "ppo")
        for seed in (0, 1)
    ]
    last = runs[-1]
    # Presets first, then options in their order: the command line wins, the seed is the study's.
    assert last.words == (
        *("smoke", "ppo", "num_steps=3", "filter.value=0.9", "algorithm.lam=0.9"),
        *("num_steps=7", "seed=1"),
    )
    assert (last.config.seed, last.config.num_steps, last.config.algorithm.lam) == (1, 7, 0.9)
    assert (last.config.filter.value, runs[0].config.filter.rule) == (0.9, "none")
    assert last.config.optimizer.lr == 1e-4  # as config.yaml of the run will say


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("seeds: 2", "seed: 2", "'seed'; did you mean 'seeds'"),
        ("none}", "nine}", "'nine'; did you mean 'none'"),
        ("{filter:", "{filtr:", "'filtr'; did you mean 'filter'"),
        ("    0.9:", "    a/b:", "a/b"),
        ("[grpo]", "[grop]", "'grop'; did you mean 'grpo'"),
        ("filter.value", "filter.vale", "arm '0.9 grpo' cannot run: unknown option 'filter.vale'"),
        ("=0.9]", "=9]", "arm '0.9 grpo' cannot run: filter: rule top_p takes a share"),
        ("[grpo]", "[grpo, seed=3]", "use 'seeds'"),
        ("[grpo]", "{grpo: 1}", "factors.algorithm.grpo"),
        ("seeds: 2", "seeds: [1, 1]", "different seeds"),
        ("seeds: 2", "seeds: 20261116", "more than 1000"),
        ("seeds: 2", "report: [sucess]", "unknown figure 'sucess'; did you mean 'success'"),
        ("question", "# question", "'question' is missing"),
        ("base:", "paper:", "paper"),
        ("seeds: 2", "seeds: 'a", "not a study in YAML"),
        (GOOD, "", "'question' is missing"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, old, new, key):
    assert old in GOOD
    (file := tmp_path / "mine.yaml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(key)) as error:
        plan_runs(read_study(str(file)))
    assert "\n" not in str(error.value)


def test_what_a_run_needs_is_checked_once_for_equal_environments_and_models(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    study = read_study(str(tmp_path / "mine.yaml"))
    seen = []
    plan_runs(study, check=seen.append)
    assert len(seen) == 1

    def refuse(_):
        raise MooredError("there is no such model")

    with pytest.raises(ConfigError, match="arm 'none grpo' cannot run: there is no such model"):
        plan_runs(study, check=refuse)


def test_the_studies_of_the_paper_can_be_planned():
    num_runs = {}
    for name in study_names():
        study = read_study(name)
        assert study.question.endswith("?") and study.paper
        num_runs[name] = len(plan_runs(study)) if not study.of else 0
    assert num_runs == {
        "bottle": 60,
        "bottle_mini": 72,
        "budget": 18,
        "compute": 6,
        "correlation": 0,
        "engines": 4,
        "filters": 55,
        "interventions": 39,
        "main_table": 96,
        "model_size": 12,
        "quartiles": 40,
        "real_engines": 9,
        "real_model": 108,
        "slip": 36,
        "trajectory_vs_prompt": 9,
    }
    assert set(read_study("correlation").of) < set(num_runs)


@pytest.mark.parametrize("name", ["bottle", "bottle_mini", "real_model"])
def test_arms_without_division_and_with_the_outcome_differ_from_grpo_in_that_alone(name):
    runs = {run.name.split("sokoban/")[-1]: run for run in plan_runs(read_study(name))}

    def differing(other: str) -> dict[str, object]:
        grpo, given = (flat_options(runs[f"{n}/seed-0"].config) for n in ("grpo/none", other))
        return {key: value for key, value in given.items() if value != grpo[key]}

    assert differing("no_division/none") == {"algorithm.advantage": "dr_grpo"}
    assert differing("grpo/outcome") == {"filter.reward": "success", "filter.rule": "nonzero"}
    assert differing("no_division/top_p") == {
        "algorithm.advantage": "dr_grpo",
        "filter.rule": "top_p",
    }


@pytest.mark.parametrize("name", ["main_table", "bottle_mini"])
def test_ppo_of_the_papers_studies_ends_cut_episodes_as_its_code_does(name):
    ppo = [run.config.algorithm for run in plan_runs(read_study(name)) if "ppo" in run.words]
    assert ppo and not any(algorithm.bootstrap_truncated for algorithm in ppo)
    options = ["algorithm.bootstrap_truncated=true"]
    stored = [run.config.algorithm for run in plan_runs(read_study(name), options)]
    assert all(algorithm.bootstrap_truncated for algorithm in stored)


def test_part_of_a_grid_can_be_chosen():
    study = restricted(read_study("main_table"), ["task=sokoban", "algorithm=ppo,grpo"])
    assert [len(arms) for arms in study.factors.values()] == [2, 1, 2]
    with pytest.raises(ConfigError, match="no factor is called 'tsk'; did you mean 'task'"):
        restricted(study, ["tsk=sokoban"])
    with pytest.raises(ConfigError, match="'task' has no arm 'sokobam'; did you mean 'sokoban'"):
        restricted(study, ["task=sokobam"])


def test_seeds_are_a_count_a_range_or_a_list():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("4-6") == (4, 5, 6)
    assert parse_seeds("7,1") == (7, 1)
    for wrong in ("0", "6-4", "1,1", "a", "-1", ""):
        with pytest.raises(ConfigError, match="a count"):
            parse_seeds(wrong)


@pytest.mark.parametrize("text", ["20261116", "1-2000", "9" * 40])
def test_a_seed_given_as_a_count_is_not_a_million_runs(text):
    with pytest.raises(ConfigError, match="more than 1000"):
        parse_seeds(text)
    assert len(parse_seeds("1000")) == 1000
    assert parse_seeds("20261116-20261116") == (20261116,)
