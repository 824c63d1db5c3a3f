"""An advantage estimator, an algorithm, a score and a rule of the user's own, by `module:attr`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.warm import run_warm

MINE = '''
"""Everything a user adds lives in this one file."""
import numpy as np

from moored.algo import dr_grpo
from moored.training.algorithms import Algorithm


def sign_of_dr_grpo(rewards, group_ids):
    with open("estimated.txt", "a") as seen:
        print(len(rewards), len(set(group_ids.tolist())), file=seen)
    return np.sign(dr_grpo(rewards, group_ids))


SIGN = Algorithm(advantage=sign_of_dr_grpo, aggregation="token_mean")


def reward_range(groups, ddof):
    return np.nanmax(groups.values_PG, axis=1) - np.nanmin(groups.values_PG, axis=1)


def all_but_the_best(ranking):
    return slice(1, None)
'''

COMMAND = "from moored.cli.main import main; main()"
SMALL = ["seed=1", "num_steps=1", "collapse.every=0", "evaluation.every=0", "filter.keep_zero=true"]


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def train(here: Path, *options: str, expect: int = 0) -> str:
    """`moored train smoke` in the folder of the user's module; returns what it printed."""
    done = run_warm(["train", "smoke", *SMALL, *options, "--run", "run"], cwd=here)
    assert done.returncode == expect, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def only_record(here: Path) -> dict[str, float]:
    (line,) = (here / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def test_an_algorithm_a_score_and_a_rule_of_ones_own_train_by_their_paths(here):
    rule = "filter.rule=mine:all_but_the_best"
    train(here, "algorithm.name=mine:SIGN", "filter.score=mine:reward_range", rule)
    assert (here / "estimated.txt").read_text() == "8 2\n"
    record = only_record(here)
    assert (record["filter/num_groups"], record["filter/num_kept"]) == (2.0, 1.0)
    # Of two groups the rule keeps the one with the smaller range.
    smaller, larger = record["filter/kept_score_mean"], record["filter/score_max"]
    assert record["filter/score_mean"] == pytest.approx((smaller + larger) / 2)
    assert smaller < larger
    assert "learner/value_loss" not in record
    stored = yaml.safe_load((here / "run" / "config.yaml").read_text())
    assert stored["algorithm"]["name"] == "mine:SIGN"


def test_an_estimator_of_ones_own_takes_the_place_of_the_algorithms(here):
    train(here, "algorithm.advantage=mine:sign_of_dr_grpo")
    assert (here / "estimated.txt").read_text() == "8 2\n"
    record = only_record(here)
    assert "learner/value_loss" not in record  # PPO's critic is not built for nothing


def test_a_path_that_leads_nowhere_is_one_sentence_and_leaves_no_run(here):
    said = train(here, "filter.rule=mine:all_but_best", expect=2)
    assert "module 'mine' has no attribute 'all_but_best'; did you mean 'all_but_the_best'?" in said
    assert "Traceback" not in said and not (here / "run").exists()
