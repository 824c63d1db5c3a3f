"""Every registered environment keeps the contract, and says in its docstring what it can do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from moored.config import load_config
from moored.envs import ENVIRONMENTS
from moored.envs.check.runner import check_env
from moored.envs.describe import describe_env, playable_names
from moored.envs.mix import EnvMix, make_env, open_env, option_defaults
from moored.reply import format_reply
from tests.contract.registered import every_environment, has_bubblewrap
from tests.warm import run_script

ROOT = Path(__file__).parents[2]
PLAYABLE = playable_names()
every_class = pytest.mark.parametrize("name", list(ENVIRONMENTS))
image_environments = pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])


@every_environment
def test_the_rules_are_kept(name: str) -> None:
    check_env(name).raise_if_failed()


@image_environments
def test_the_rules_are_kept_in_pictures(name: str) -> None:
    check_env(name, options={"view": "image"}, num_tasks=2, num_split_seeds=20).raise_if_failed()


def test_the_rules_are_kept_with_symbolic_answers() -> None:
    # math-verify has 1 s of computing for an answer; the other half second is for a busy machine.
    options = {"math_verify": True}
    check_env("metamath", options=options, num_tasks=2, reply_limit_s=1.5).raise_if_failed()


@every_environment
def test_the_penalty_for_a_malformed_reply_is_recorded_apart_from_the_task_reward(
    name: str,
) -> None:
    with open_env(name, format_penalty=-0.7) as env:
        env.reset(3)
        result = env.step("no tags at all")
        assert (result.is_valid, result.reward, result.penalty) == (False, -0.7, -0.7)
        env.reset(3)
        assert env.step(format_reply("thought", env.oracle())).penalty == 0.0


@every_class
def test_the_class_has_the_name_it_is_registered_under(name: str) -> None:
    factory: Any = ENVIRONMENTS.get_object(name)
    assert factory.name == name


@every_class
def test_the_docstring_explains_reward_and_every_option(name: str) -> None:
    info = describe_env(name)
    assert len(info.summary) <= 100
    assert info.reward
    undocumented = [option for option in info.options if not re.search(rf"\b{option}\b", info.doc)]
    assert undocumented == []


@every_class
def test_options_are_keywords(name: str) -> None:
    factory = ENVIRONMENTS.get_object(name)
    assert callable(factory)
    kinds = {item.kind for item in inspect.signature(factory).parameters.values()}
    assert inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds
    assert inspect.Parameter.VAR_POSITIONAL not in kinds


@every_environment
def test_the_prompt_states_the_real_number_of_turns(name: str) -> None:
    factory = ENVIRONMENTS.get_object(name)
    assert callable(factory)
    if "max_turns" not in option_defaults(factory):
        pytest.skip("the number of turns is fixed")
    env = make_env(name, max_turns=37)
    assert any(re.search(r"\b37\b", message.text) for message in env.reset(0))


@every_environment
def test_the_prompt_states_the_real_format_penalty(name: str) -> None:
    env = make_env(name, format_penalty=-0.37)
    assert any("-0.37" in message.text for message in env.reset(0))
    result = env.step("no tags")
    assert (result.reward, result.is_valid) == (-0.37, False)


def test_all_environments_can_be_mixed() -> None:
    names = [name for name in PLAYABLE if name != "code" or has_bubblewrap]
    mix = EnvMix(load_config({"env": names}).env)
    mix.check()
    assert [make().name for make in mix.makers] == names


def test_the_documentation_pages_are_fresh() -> None:
    result = run_script(ROOT / "docs" / "build_env_pages.py", "--check", slim=True)
    assert result.returncode == 0, result.stderr
