"""Bandit: payoffs, one prompt per group, noise per episode, malformed replies."""

from __future__ import annotations

import pytest

from moored.envs.bandit import DARING, STEADY, Bandit
from moored.errors import EnvError
from moored.reply import format_reply

TRAIN, VALIDATION, TEST = 0, 1 << 40, 2 << 40


def arms_of(env: Bandit, task_seed: int) -> tuple[str, str]:
    """The two names in the order the prompt gives them."""
    words = env.reset(task_seed)[1].text.replace(".", "").split()
    first, second = (word for word in words if word in STEADY + DARING)
    return first, second


def pull(env: Bandit, kind: tuple[str, ...], task_seed: int = 0, episode_seed: int = 0):
    arm = next(arm for arm in arms_of(env, task_seed) if arm in kind)
    env.reset(task_seed, episode_seed)
    return env.step(format_reply("", arm))


def test_every_name_stands_for_one_kind_of_arm():
    assert len(set(STEADY + DARING)) == len(STEADY) + len(DARING) >= 60


def test_the_safe_arm_always_pays_a_tenth_and_is_no_success():
    for seed in range(50):
        result = pull(Bandit(), STEADY, seed, seed)
        assert (result.reward, result.terminated, result.is_valid, result.success) == (
            0.1,
            True,
            True,
            False,
        )
        assert result.metrics == {"chose_risky": 0}


@pytest.mark.parametrize("is_same_task", [True, False])
def test_the_risky_arm_pays_one_in_a_quarter_of_the_episodes_and_is_the_success(is_same_task: bool):
    env = Bandit()
    rewards = []
    for seed in range(4000):
        result = pull(env, DARING, 7 if is_same_task else seed, seed)
        assert result.success
        assert result.metrics == {"chose_risky": 1}
        rewards.append(result.reward)
    assert set(rewards) == {0.0, 1.0}
    # Four standard errors of a share of 0.25 in 4000: 4 * sqrt(0.25 * 0.75 / 4000) = 0.027.
    assert abs(sum(rewards) / 4000 - 0.25) < 0.028


def test_what_the_risky_arm_pays_cannot_be_told_from_the_prompt():
    # Task and noise seeded with one number must not share one stream.
    env = Bandit()
    paid = {name: [] for name in STEADY[:10]}
    for seed in range(4000):
        steady = next(arm for arm in arms_of(env, seed) if arm in STEADY)
        if steady in paid:
            paid[steady].append(pull(env, DARING, seed, seed).reward)
    for rewards in paid.values():
        assert 0.1 < sum(rewards) / len(rewards) < 0.4


def test_episodes_of_equal_number_are_independent_between_tasks():
    # With noise of the episode seed alone, all tasks would pay, or not, together.
    env = Bandit()
    paid = [pull(env, DARING, task, 7).reward for task in range(200)]
    assert 30 < sum(paid) < 70


def test_each_task_shows_one_steady_and_one_daring_name_in_either_order():
    env = Bandit()
    pairs = [arms_of(env, seed) for seed in range(400)]
    daring_first = sum(first in DARING for first, _ in pairs)
    assert all((first in DARING) != (second in DARING) for first, second in pairs)
    assert 150 < daring_first < 250
    assert len(set(pairs)) > 300


def test_splits_share_no_pair_in_any_order():
    env = Bandit()
    pairs = [
        {frozenset(arms_of(env, first + seed)) for seed in range(500)}
        for first in (TRAIN, VALIDATION, TEST)
    ]
    assert all(len(split) > 100 for split in pairs)
    assert not pairs[0] & pairs[1]
    assert not pairs[0] & pairs[2]
    assert not pairs[1] & pairs[2]


def test_in_reverse_steady_names_are_the_risky_arms_behind_the_same_prompt():
    env = Bandit(reverse=True)
    assert env.reset(3) == Bandit().reset(3)
    assert {pull(env, STEADY, 3, seed).reward for seed in range(30)} == {0.0, 1.0}
    safe = pull(env, DARING, 3)
    assert (safe.reward, safe.success) == (0.1, False)
    assert env.oracle() in STEADY


def test_payoffs_are_options_and_the_prompt_states_them():
    env = Bandit(safe_reward=0.3, risky_reward=5, risky_probability=0.05, format_penalty=-2)
    system = env.reset(0)[0].text
    for part in ("always pays 0.3", "pays 5 with probability 0.05", "earns -2"):
        assert part in system
    # 0.05 * 5 = 0.25 < 0.3: here the safe arm is the better one.
    assert pull(env, STEADY).success
    assert not pull(env, DARING).success
    assert env.oracle() in STEADY
    assert pull(Bandit(risky_probability=1), DARING).reward == 1


def test_the_prompt_does_not_say_which_arm_is_which():
    # Swapping the two names leaves the rest of the first messages as it is.
    env = Bandit()
    templates = set()
    for seed in range(50):
        first, second = arms_of(env, seed)
        text = "".join(message.text for message in env.reset(seed))
        templates.add(text.replace(first, "ARM").replace(second, "ARM"))
    assert len(templates) == 1


def test_equal_means_make_either_arm_a_success():
    env = Bandit(safe_reward=0.25)
    assert pull(env, STEADY).success
    assert pull(env, DARING).success


def test_an_arm_may_be_named_in_any_case():
    env = Bandit()
    env.reset(0)
    assert env.step(format_reply("", f" {env.oracle().upper()} ")).is_valid


def test_an_impossible_probability_is_refused():
    with pytest.raises(EnvError, match=r"risky_probability .* got 1.5"):
        Bandit(risky_probability=1.5)


@pytest.mark.parametrize(
    "answer",
    ["", "Wizard", "1", "{0} || {1}", "{0} || {0}", "{0}.", "{0} {1}", "x" * 1_000_000],
)
def test_an_answer_that_is_not_one_arm_is_malformed_and_ends_the_game(answer: str):
    env = Bandit(format_penalty=-0.5)
    arms = arms_of(env, 0)
    result = env.step(format_reply("", answer.format(*arms)))
    assert (result.reward, result.terminated, result.is_valid, result.success) == (
        -0.5,
        True,
        False,
        False,
    )
    with pytest.raises(EnvError, match="over"):
        env.step(format_reply("", arms[0]))


def test_a_malformed_reply_earns_no_more_than_the_worse_arm():
    for options, reward in [
        ({}, -0.1),
        ({"safe_reward": -0.5}, -0.5),
        ({"safe_reward": -0.5, "risky_reward": -2.0}, -2.0),
        ({"safe_reward": -0.5, "format_penalty": -0.1}, -0.1),
    ]:
        env = Bandit(**options)
        system, _ = env.reset(0)
        assert f"A malformed reply earns {reward:g} and ends the game" in system.text
        assert env.step("no tags").reward == reward
