"""`moored envs`: the same list in a pipe, on a wide and on a narrow terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moored.cli.envs import envs_command, print_envs
from moored.envs import ENVIRONMENTS
from moored.envs.describe import describe_env, playable_names
from moored.envs.mix import make_env


@pytest.mark.parametrize("columns", [30, 40, 69])
def test_envs_can_be_read_on_a_narrow_terminal(columns):
    console = Console(file=io.StringIO(), width=columns)
    print_envs(console, [describe_env(name) for name in ENVIRONMENTS])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "sokoban · 5 turns Push every box onto a target. Reward: −0.1 for every action" in text
    assert "Extras: data, math bandit · 1 turn" in text


def test_envs_lists_every_environment(capsys):
    envs_command()
    table = capsys.readouterr().out
    envs_command(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in listed] == list(ENVIRONMENTS)
    for item in listed:
        assert item["name"] in table
        assert item["summary"] and item["reward"]
        assert item["required"] or item["max_turns"] >= 1
    extras = {item["name"]: item["extras"] for item in listed}
    assert extras["metamath"] == ["moored[data]", "moored[math]"]
    assert extras["sokoban"] == extras["frozen_lake"] == ["moored[images]"]


def test_environments_are_listed_and_described_without_a_sandbox(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    envs_command()
    assert "code" in capsys.readouterr().out
    assert describe_env("code").max_turns == make_env("code").max_turns == 1
    assert "Python 3" in make_env("code").reset(0)[0].text


@pytest.mark.parametrize("name", playable_names())
def test_what_is_listed_holds_for_an_environment_with_default_options(name):
    env, info = make_env(name), describe_env(name)
    assert (info.max_turns, info.is_stochastic) == (env.max_turns, env.is_stochastic)
