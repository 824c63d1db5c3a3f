"""Which algorithm a configuration names, and with which pieces."""

from __future__ import annotations

import numpy as np
import pytest

from moored import algo
from moored.config import AlgorithmConfig, load_config
from moored.errors import MooredError
from moored.names import ALGORITHMS, ESTIMATORS
from moored.training.algorithms import (
    BILEVEL_GAE,
    GRPO,
    PPO,
    Algorithm,
    TokenEstimator,
    load_algorithm,
    load_estimator,
)
from moored.training.losses import ppo_clip
from tests.warm import run_warm

OWN = f"{__name__}:second_is_better"
NOT_ONE = {"advantage": "grpo"}


def second_is_better(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.arange(len(rewards)) % 2 - 0.5


def options(**given: object) -> AlgorithmConfig:
    return load_config({"algorithm": given}).algorithm


def test_every_registered_algorithm_and_estimator_loads():
    algorithms = {name: load_algorithm(options(name=name)) for name in ALGORITHMS}
    assert [name for name, found in algorithms.items() if found.needs_critic] == ["ppo"]
    assert [name for name, found in algorithms.items() if found.loss is not ppo_clip] == [
        "gspo",
        "cispo",
    ]
    assert load_estimator("grpo") is algo.grpo
    assert all(load_estimator(name) for name in ESTIMATORS)


def test_options_replace_pieces_of_the_algorithm_they_name():
    found = load_algorithm(options(name="ppo", advantage="bilevel_gae"))
    assert found.advantage is BILEVEL_GAE and found.needs_critic
    assert found.aggregation == PPO.aggregation
    found = load_algorithm(options(name="grpo", aggregation="constant"))
    assert (found.advantage, found.aggregation) == (GRPO.advantage, "constant")
    assert load_algorithm(options(name="grpo")) is GRPO


def surprise(stream, _):
    return -stream.advantages * stream.logp, stream.logp > 0.0


SURPRISE = Algorithm(advantage=algo.grpo, aggregation="token_mean", loss=surprise)


def test_a_loss_of_ones_own_is_that_of_an_algorithm_by_its_path():
    found = load_algorithm(options(name=f"{__name__}:SURPRISE", aggregation="constant"))
    assert (found.loss, found.aggregation) == (surprise, "constant")


def test_an_estimator_of_ones_own_needs_no_critic_and_no_registration():
    found = load_algorithm(options(name="ppo", advantage=OWN))
    assert found.advantage is second_is_better and not found.needs_critic


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "nowhere_at_all:PPO"}, "no module named 'nowhere_at_all'; check the spelling"),
        ({"name": "moored.training.algorithms:PP0"}, "did you mean 'PPO'?"),
        (
            {"name": f"{__name__}:NOT_ONE"},
            "is of type dict; name a moored",
        ),
        ({"name": OWN}, "give a function of your own as algorithm.advantage"),
        (
            {"advantage": f"{__name__}:NOT_ONE"},
            r"name a function \(rewards, group_ids\)",
        ),
    ],
)
def test_a_path_to_something_else_says_what_is_wanted(given, message):
    with pytest.raises(MooredError, match=message):
        load_algorithm(options(**given))


def test_a_typo_is_answered_without_importing_torch():
    code = (
        "import sys\nfrom moored.config import load_config\n"
        "try:\n    load_config({}, ['algorithm.name=grop'])\n"
        "except ValueError as error:\n    print(error, 'torch' in sys.modules)"
    )
    said = run_warm([], code=code, slim=True)
    assert "unknown algorithm 'grop'; did you mean 'grpo'?" in said.stdout
    assert said.stdout.endswith("False\n")


def test_ddof_one_divides_the_std_of_a_group_by_one_less():
    # Rewards 0 and 2: std 1 with ddof 0, sqrt(2) with 1.
    rewards, groups = np.array([0.0, 2.0]), np.array([0, 0])
    for name in ("grpo", "dapo", "gspo", "cispo"):
        for ddof, std in ((0, 1.0), (1, 2.0**0.5)):
            estimate = load_algorithm(options(name=name, ddof=ddof)).advantage
            assert not isinstance(estimate, TokenEstimator)
            np.testing.assert_allclose(estimate(rewards, groups), [-1 / std, 1 / std], rtol=1e-5)
    assert load_algorithm(options(name="ppo", advantage="grpo", ddof=1)).advantage is not algo.grpo
