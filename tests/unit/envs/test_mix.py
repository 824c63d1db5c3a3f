"""Mixed environments: parsing, option errors, and which group gets which environment."""

from __future__ import annotations

import pytest
import yaml

from moored.envs.base import StepResult
from moored.envs.mix import REQUIRED, EnvMix, EnvSpec, make_env, option_defaults
from moored.errors import ConfigError, EnvError, MooredError, UnknownNameError
from moored.types import Message


class Echo:
    """Say hello."""

    name = "echo"
    is_stochastic = False

    def __init__(self, *, max_turns: int = 1, word: str = "hello") -> None:
        if max_turns < 1:
            raise EnvError(f"echo: max_turns must be at least 1, got {max_turns}")
        self.max_turns, self.word = max_turns, word

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        return [Message("system", "Echo."), Message("user", self.word)]

    def step(self, reply: str) -> StepResult:
        return StepResult(observation="", reward=0.0, done=True)

    def oracle(self) -> str:
        return self.word

    def close(self) -> None:
        pass


class LoudEcho(Echo):
    def __init__(self, *, volume: int = 11, **options) -> None:
        super().__init__(**options)
        self.volume = volume


def test_options_reach_the_constructor() -> None:
    assert make_env(Echo, max_turns=3).max_turns == 3


def test_a_function_makes_environments_too() -> None:
    assert make_env(lambda turns=4: Echo(max_turns=turns), turns=2).max_turns == 2


def test_options_of_base_classes_are_known_where_they_are_passed_on() -> None:
    assert option_defaults(LoudEcho) == {"volume": 11, "max_turns": 1, "word": "hello"}
    assert make_env(LoudEcho, max_turns=5).max_turns == 5


def test_an_option_without_default_must_be_given() -> None:
    def make(size):
        return Echo(max_turns=size)

    assert option_defaults(make) == {"size": REQUIRED}
    with pytest.raises(ConfigError, match="needs the option 'size'"):
        make_env(make)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turn": 3}, r"Echo has no option 'max_turn'; did you mean 'max_turns'\?"),
        ({"colour": 3}, r"Echo has no option 'colour'; choose one of max_turns, word"),
        ({"max_turns": "five"}, r"Echo cannot be made with max_turns='five'"),
        ({"max_turns": 0}, r"max_turns must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(MooredError, match=message):
        make_env(Echo, **options)


def test_an_instance_is_not_a_source() -> None:
    with pytest.raises(EnvError, match="give the class itself"):
        make_env(Echo())  # pyright: ignore[reportArgumentType]


def test_what_is_made_must_be_an_environment() -> None:
    with pytest.raises(EnvError, match="made a dict, which is no environment: it lacks name"):
        make_env(lambda: {})


def test_unknown_names_are_explained() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sokoban'"):
        make_env("sokobann")


def test_a_name_a_mapping_and_a_list_are_read() -> None:
    assert EnvMix.parse("bandit").specs == (EnvSpec("bandit"),)
    assert EnvMix.parse({"name": "bandit", "weight": 3}).specs == (EnvSpec("bandit", 3),)
    text = "[{name: sokoban, weight: 2}, {name: countdown, options: {max_number: 9}}, my_env:Mine]"
    assert EnvMix.parse(yaml.safe_load(text)).specs == (
        EnvSpec("sokoban", 2),
        EnvSpec("countdown", 1.0, {"max_number": 9}),
        EnvSpec("my_env:Mine"),
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "env names no environment"),
        ({"weight": 1}, "needs a 'name'"),
        ({"name": "sokoban", "wieght": 2}, r"unknown key 'wieght' in env; did you mean 'weight'\?"),
        ([{"name": "sokoban", "weight": 0}], "must be a positive number, got 0"),
        ([{"name": "sokoban", "weight": "2"}], "must be a positive number, got '2'"),
        ([{"name": "sokoban", "weight": float("inf")}], "must be a positive number, got inf"),
        ([{"name": "sokoban", "options": [1]}], r"must be a mapping of option to value, got \[1\]"),
        ([{"name": 2048}], "must be a non-empty text, got 2048"),
        ([7], "must be a name or a mapping with 'name', got 7"),
        (None, "must be a name or a mapping with 'name', got None"),
    ],
)
def test_wrong_specs_are_explained(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvMix.parse(spec)  # pyright: ignore[reportArgumentType]


def test_every_stretch_of_groups_holds_the_mix() -> None:
    weights = {"a": 5, "b": 2, "c": 0.37}
    mix = EnvMix(tuple(EnvSpec(name, weight) for name, weight in weights.items()))
    names = [mix.spec_of_group(group, seed=7).name for group in range(5000)]
    for start in range(0, 5000, 37):
        for length in (16, 100, 2000):
            window = names[start : start + length]
            for name, weight in weights.items():
                share = len(window) * weight / sum(weights.values())
                assert abs(window.count(name) - share) < 4


def test_the_choice_depends_on_group_and_seed_alone() -> None:
    mix = EnvMix.parse(["a", "b"])
    forward = [mix.index_of_group(group, seed=1) for group in range(64)]
    backward = [mix.index_of_group(group, seed=1) for group in reversed(range(64))]
    assert backward[::-1] == forward
    assert forward != [mix.index_of_group(group, seed=2) for group in range(64)]


def test_one_environment_takes_every_group() -> None:
    mix = EnvMix.parse("a")
    assert {mix.index_of_group(group, seed=group) for group in range(1000)} == {0}


def test_groups_are_counted_from_zero() -> None:
    with pytest.raises(MooredError, match="counted from 0, got -1"):
        EnvMix.parse("a").index_of_group(-1)
