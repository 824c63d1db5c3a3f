"""An environment in the current folder, whose answers are judged in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from moored.runlog.log import read_records
from tests.warm import MAIN, run_warm

MY_ENV = '''
from moored.envs.base import StepResult
from moored.envs.worker import Worker
from moored.types import Message


def judge(reply):
    """Runs in the child, which has to find this module, too."""
    return len(reply) % 2


class Parity:
    name = "parity"
    is_stochastic = False
    max_turns = 1

    def __init__(self):
        self._worker = Worker("my_env:judge")

    def reset(self, task_seed, episode_seed=0):
        return [Message("system", "Write."), Message("user", f"Task {task_seed}.")]

    def step(self, reply):
        reward = float(self._worker.ask(reply))
        return StepResult(observation="", reward=reward, terminated=True, success=reward > 0)

    def oracle(self):
        return "x"

    def close(self):
        self._worker.stop()
'''

SMALL = ["num_steps=1", "rollout.group_size=2", "rollout.max_response_tokens=8"]
SMALL += ["rollout.env_workers=2", "evaluation.every=0", "collapse.every=0", "rollout.num_groups=2"]


def moored(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: the current folder is not on Python's path."""
    return run_warm(words, code=f"import sys; sys.path.remove(''); {MAIN}", cwd=folder)


def test_train_resume_and_eval_find_an_environment_of_the_current_folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "my_env.py").write_text(MY_ENV)
    run = tmp_path / "runs" / "grpo"
    for words in (
        ["train", "grpo", "env=my_env:Parity", *SMALL],
        ["train", "--resume", "runs/grpo", "num_steps=2"],
    ):
        done = moored(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_records(run)] == [1, 2]
    assert all(record["rollout/error_count"] == 0 for record in read_records(run))
    done = moored(tmp_path, "eval", "runs/grpo", "-n", "2", "--json")
    assert json.loads(done.stdout)["num_errors"] == 0, done.stderr


def test_from_another_folder_the_message_says_where_to_start(tmp_path):
    done = moored(tmp_path, "train", "grpo", "env=my_env:Parity")
    assert done.returncode == 2
    assert "start the command in the folder of my_env.py" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
