"""With `--json` standard output is one record, whatever environments print."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from moored.cli import main as cli
from moored.cli.json_output import print_json, with_json_alone

LOUD = '''
"""An environment that prints, also from a child process and below Python."""
import os
import subprocess

from moored.envs.bandit import Bandit


class Loud(Bandit):
    def reset(self, task_seed, episode_seed):
        print("printed")
        subprocess.run(["echo", "from a child"], check=True)
        os.write(1, b"below Python")
        return super().reset(task_seed, episode_seed)
'''


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    (tmp_path / "loud_env.py").write_text(LOUD)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moored", *words], cwd=folder, capture_output=True, text=True
    )


def test_what_environments_print_goes_to_stderr_with_json(loud):
    done = run(loud, "eval", "nano", "--env", "loud_env:Loud", "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_tasks"] == 2
    for text in ("printed", "from a child", "below Python"):
        assert text in done.stderr


def test_without_json_environments_print_where_they_like(loud):
    done = run(loud, "eval", "nano", "--env", "loud_env:Loud", "-n", "2")
    assert "printed" in done.stdout and "below Python" in done.stdout


def test_every_command_with_json_prints_only_its_record():
    """A command that printed its record itself would print it to stderr."""
    folder = Path(cli.__file__).parent
    with_option = [file for file in folder.glob("*.py") if "as_json: AsJson" in file.read_text()]
    assert len(with_option) > 10
    for file in with_option:
        assert "print(json.dumps" not in file.read_text(), file.name


def test_a_stream_that_a_caller_put_in_place_gets_the_record_alone(capsys):
    @with_json_alone
    def command(*, as_json: bool) -> None:
        print("an environment")
        print_json({"steps": 3})

    command(as_json=True)
    found = capsys.readouterr()
    assert found.out == '{\n  "steps": 3\n}\n'
    assert found.err == "an environment\n"
    command(as_json=False)
    assert capsys.readouterr().out.startswith("an environment\n{")


def test_numbers_that_json_lacks_are_null(capsys):
    """Such as the mean reward where every episode ended in an error of its environment."""
    print_json({"reward": math.nan, "parts": [{"loss": math.inf}, (-math.inf, 0.5)]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "reward": None,
        "parts": [{"loss": None}, [None, 0.5]],
    }


def test_output_goes_where_it_went_after_a_command_that_fails(capsys):
    @with_json_alone
    def command(*, as_json: bool) -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        command(as_json=True)
    print("later")
    assert capsys.readouterr().out == "later\n"
