"""The gymnasium adapter against the real package, and the examples of docs/adapters.md."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from PIL import Image

from moored.envs import format_reply
from moored.envs.adapters import GymnasiumEnv
from moored.envs.adapters.gymnasium import best_action
from moored.envs.base import SPLIT_SEEDS
from moored.envs.mix import open_env
from moored.errors import EnvError, UnknownNameError
from moored.types import Message, messages_digest

DOCS = Path(__file__).parents[4] / "docs" / "adapters.md"
VALIDATION, TEST = SPLIT_SEEDS["validation"].start, SPLIT_SEEDS["test"].start
STEADY = {"is_slippery": False}
COMPASS = ("Left", "Down", "Right", "Up")


def answer(text: object) -> str:
    return format_reply("", str(text))


def play(env: GymnasiumEnv, answers: list, *, task: int = 0, episode: int = 0) -> list:
    """Reset, give the answers until done, return the results."""
    env.reset(task, episode)
    results = []
    for text in answers:
        results.append(env.step(answer(text)))
        if results[-1].is_over:
            break
    return results


# gymnasium: dynamics


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({"env": "CliffWalking-v1"}, -100),  # the cliff
        ({"env": "Taxi-v4"}, -10),  # a passenger set down in the wrong place
        ({"env": "FrozenLake-v1"}, -0.1),
        ({"env": "CartPole-v1"}, -0.1),  # without a table
        ({"env": "CliffWalking-v1", "format_penalty": -1}, -1),
    ],
)
def test_a_malformed_reply_costs_what_the_dearest_step_of_the_table_does(options, reward) -> None:
    env = GymnasiumEnv(**options)
    system, _ = env.reset(0)
    assert f"A malformed reply earns {reward:g}, changes nothing" in system.text
    result = env.step("no tags")
    assert (result.reward, result.penalty) == (reward, reward)


def test_a_walk_around_the_holes_reaches_the_goal() -> None:
    env = GymnasiumEnv(make_options=STEADY, to_action=COMPASS)
    # SFFF/FHFH/FFFH/HFFG: cells 4, 8, 9, 10, 14 are frozen, 15 is the goal.
    results = play(env, ["Down", "Down", "right", " RIGHT ", "Down", "Right"])
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.terminated for result in results] == [False] * 5 + [True]
    assert results[-1].success and not results[-1].truncated
    assert str(results[0].observation).startswith("Reward: 0.\nTurn 2 of 20.\n4\n")


def test_a_hole_ends_the_episode_without_success() -> None:
    results = play(GymnasiumEnv(make_options=STEADY), [2, 1])
    assert [result.terminated for result in results] == [False, True]
    assert not results[-1].success and not results[-1].truncated


def test_a_time_limit_of_the_environment_truncates() -> None:
    env = GymnasiumEnv(make_options=STEADY | {"max_episode_steps": 2})
    results = play(env, [0, 0, 0])
    assert len(results) == 2
    assert not results[-1].success
    assert (results[-1].terminated, results[-1].truncated) == (False, True)


def test_an_end_at_the_time_limit_is_terminated_only() -> None:
    # Right, then down into the hole: gymnasium reports both, as the limit is 2 as well.
    env = GymnasiumEnv(make_options=STEADY | {"max_episode_steps": 2}, max_turns=2)
    last = play(env, [2, 1])[-1]
    assert (last.terminated, last.truncated) == (True, False)


def test_the_turn_limit_truncates_and_no_step_follows() -> None:
    env = GymnasiumEnv(make_options=STEADY, max_turns=3)
    results = play(env, [0, "junk", 0])
    assert [result.truncated for result in results] == [False, False, True]
    assert not any(result.terminated for result in results)
    with pytest.raises(EnvError, match="call reset"):
        env.step(answer(0))


def test_slips_are_those_of_gymnasium_with_the_generator_of_the_episode() -> None:
    env = GymnasiumEnv(to_text=str)
    env.reset(0, 11)
    start_seed, episode_seed = env._seeds
    raw = gymnasium.make("FrozenLake-v1")
    raw.reset(seed=start_seed)
    raw.unwrapped.np_random = np.random.default_rng([start_seed, episode_seed])
    expected = []
    for _ in range(20):
        cell, reward, terminated, *_ = raw.step(2)
        expected.append((str(cell), reward))
        if terminated:
            break
    results = play(env, [2] * 20, episode=11)
    assert [result.reward for result in results] == [reward for _, reward in expected]
    cells = [str(result.observation).splitlines()[2] for result in results[:-1]]
    assert cells == [cell for cell, _ in expected[:-1]]


def test_blackjack_deals_the_same_hand_and_other_cards_after_it() -> None:
    env = GymnasiumEnv(env="Blackjack-v1", to_action=("Stick", "Hit"))
    hands = {messages_digest(env.reset(task)) for task in range(30)}
    assert len(hands) > 10
    low = next(task for task in range(100) if _player_sum(env.reset(task)) < 12)
    starts = {messages_digest(env.reset(low, episode)) for episode in range(10)}
    draws = {play(env, ["Hit"], task=low, episode=e)[0].observation for e in range(10)}
    assert len(starts) == 1
    assert len(draws) > 3


def _player_sum(messages: list[Message]) -> int:
    found = re.search(r"\((\d+),", messages[1].text)
    assert found is not None
    return int(found[1])


def test_a_fall_from_the_cliff_costs_100_and_leads_back_to_the_only_start() -> None:
    env = GymnasiumEnv(env="CliffWalking-v1", to_action=("Up", "Right", "Down", "Left"))
    start = env.reset(0)
    (fall,) = play(env, ["Right"])
    assert fall.reward == -100 and not fall.is_over
    assert str(fall.observation).splitlines()[2] == "36"
    prompts = {messages_digest(env.reset(task)) for task in (0, 1, VALIDATION, TEST)}
    assert prompts == {messages_digest(start)}


def test_taxi_starts_belong_to_one_split_each() -> None:
    env = GymnasiumEnv(env="Taxi-v4")
    splits = [
        {messages_digest(env.reset(first + offset)) for offset in range(60)}
        for first in (0, VALIDATION, TEST)
    ]
    assert all(len(starts) > 5 for starts in splits)
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


def test_the_environment_that_the_page_names_can_be_made() -> None:
    (name,) = re.findall(r"`env: (gymnasium:[^`]+)`", DOCS.read_text())
    with open_env(name) as env:
        assert env.reset(0)


# gymnasium: replies


@pytest.mark.parametrize(
    "text", ["4", "-1", "Up", "1 || 2", "1.0", "", "1" * 5000, "[" * 4000, "\ud800"]
)
def test_an_answer_that_is_no_action_is_malformed_and_moves_nothing(text: str) -> None:
    env = GymnasiumEnv(make_options=STEADY, format_penalty=-0.25)
    env.reset(0)
    result = env.step(answer(text))
    assert (result.reward, result.is_valid, result.is_over) == (-0.25, False, False)
    lines = str(result.observation).splitlines()
    assert lines[:3] == ["Malformed reply. Reward: -0.25.", "Turn 2 of 20.", "0"]


def test_several_names_in_one_answer_are_malformed() -> None:
    (result,) = play(GymnasiumEnv(to_action=COMPASS), ["Up || Down"])
    assert not result.is_valid


# gymnasium: options


class Coin(gymnasium.Env):
    """Starts with one of `num_starts` numbers; a continuous action ends the episode."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    observation_space = gymnasium.spaces.Discrete(8)

    def __init__(self, num_starts: int = 2) -> None:
        self.num_starts = num_starts

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        return int(self.np_random.integers(self.num_starts)), {}

    def step(self, action: np.ndarray) -> tuple[int, float, bool, bool, dict]:
        return 0, float(action[0]), True, False, {"won": True}


def to_vector(text: str) -> np.ndarray:
    return np.array([float(text)], dtype=np.float32)


def has_won(total: float, terminated: bool, info: dict) -> bool:
    return bool(info.get("won"))


def say_half(env: gymnasium.Env) -> str:
    return "0.5"


def picture(cell: int) -> list:
    image = Image.new("L", (2, 2), color=cell)
    return [{"type": "text", "text": "You see "}, {"type": "image", "image": image}]


def test_user_functions_play_an_environment_of_ones_own() -> None:
    env = GymnasiumEnv(
        env=Coin, to_action=to_vector, success=has_won, oracle=say_half, fixed_start=True
    )
    env.reset(0)
    result = env.step(answer(env.oracle()))
    assert (result.reward, result.is_over, result.success) == (0.5, True, True)
    env.reset(0)
    assert not env.step(answer("1.5")).is_valid
    assert not env.step(answer("much")).is_valid


def test_too_few_starts_for_three_splits_say_what_to_do() -> None:
    env = GymnasiumEnv(env=Coin, to_action=to_vector)
    with pytest.raises(EnvError, match="fixed_start=True"):
        for task in (0, VALIDATION, TEST):
            env.reset(task)


def test_make_options_reach_a_function_that_makes_the_environment() -> None:
    env = GymnasiumEnv(env=Coin, make_options={"num_starts": 1}, to_action=to_vector)
    assert messages_digest(env.reset(0)) == messages_digest(env.reset(VALIDATION))


def test_observations_may_be_pictures() -> None:
    _, user = GymnasiumEnv(to_text=picture).reset(0)
    assert len(user.images) == 1
    assert user.text.startswith("Turn 1 of 20.\nYou see \nReply as <think>")


def test_functions_may_be_given_as_paths() -> None:
    env = GymnasiumEnv(to_text="builtins:ascii", make_options=STEADY)
    assert "\n0\n" in env.reset(0)[1].text
    with pytest.raises(UnknownNameError, match="to_text"):
        GymnasiumEnv(to_text="builtins:asci")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymnasiumEnv(max_turns=0), "max_turns must be at least 1, got 0"),
        (lambda: GymnasiumEnv(env="NoLake-v1").reset(0), "cannot make 'NoLake-v1'"),
        (lambda: GymnasiumEnv(to_action=["Left"]).reset(0), "has 4 actions, .* names 1"),
        (lambda: GymnasiumEnv(env=Coin).reset(0), r"give to_action="),
        (lambda: GymnasiumEnv().oracle(), "call reset"),
    ],
)
def test_wrong_options_say_what_was_wrong(make: Callable, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make()


# gymnasium: oracle, pickling, contract


def test_an_oracle_is_missing_where_there_is_no_transition_table() -> None:
    env = GymnasiumEnv(env="Blackjack-v1")
    env.reset(0)
    with pytest.raises(EnvError, match="give oracle="):
        env.oracle()


def test_planning_waits_for_a_large_reward_only_if_there_is_time() -> None:
    # State 0: action 0 ends with 1, action 1 leads to state 1, from where all ends with 3.
    table = {
        0: {0: [(1.0, 2, 1.0, True)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 2, 3.0, True)], 1: [(1.0, 2, 3.0, True)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    }
    assert best_action(table, 0, horizon=1) == 0
    assert best_action(table, 0, horizon=2) == 1
    # When action 1 works one time in four, 3/4 < 1.
    table[0][1] = [(0.25, 1, 0.0, False), (0.75, 2, 0.0, True)]
    assert best_action(table, 0, horizon=5) == 0


def test_the_oracle_takes_a_taxi_passenger_home() -> None:
    env = GymnasiumEnv(env="Taxi-v4")
    env.reset(3)
    rewards = []
    done = False
    while not done:
        result = env.step(answer(env.oracle()))
        rewards.append(result.reward)
        done = result.is_over
    assert rewards[-1] == 20 and set(rewards[:-1]) == {-1}
    assert result.success


def test_a_copy_pickled_in_mid_episode_goes_on_alike() -> None:
    env = GymnasiumEnv(to_action=COMPASS, success=has_won)
    env.reset(2, 9)
    env.step(answer("Down"))
    env.step("junk")
    copy = pickle.loads(pickle.dumps(env))
    for name in ("Right", "Down", "Right", "Right"):
        ours, theirs = env.step(answer(name)), copy.step(answer(name))
        assert ours == theirs
        if ours.is_over:
            break


# documentation


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
)
def test_the_examples_of_the_page_run(code: str) -> None:
    space: dict = {}
    exec(code, space)
    assert space["result"].is_valid
    assert "Reply as <think>" in space["system"].text
