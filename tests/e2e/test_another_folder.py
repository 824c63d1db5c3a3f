"""A run goes on from any folder as it would have gone on where it was started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moored.cli.run_folders import import_from_start
from moored.models.located import noted_folder
from moored.runlog.log import RunLog, read_records

RUN_WORDS = ["collapse.every=0", "evaluation.every=0", "checkpoint_every=1", "filter.rule=none"]
RUN_WORDS += ["rollout.num_groups=2", "rollout.group_size=2", "rollout.max_response_tokens=4"]
RUN_WORDS += ["stop.low_variance=0", "rollout.max_context=64", "optimizer.lr=0.01"]
SFT_WORDS = ["num_steps=3", "checkpoint_every=1", "batch_tokens=32", "max_context=64"]
SFT_WORDS += ["evaluation.num_dialogues=2", "optimizer.lr=0.01"]


@pytest.fixture
def project(tmp_path, toy_folder, monkeypatch) -> Path:
    """The current folder: a model, questions, and dialogues, all by relative paths."""
    torch.set_num_threads(1)
    folder = tmp_path / "project"
    shutil.copytree(toy_folder, folder / "tuned")
    rows = [{"query": f"A {i}?", "response": f"The answer is: {i}"} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["A B", "B C", "C D", "D E", "E A", "A C", "B D", "C E", "D A", "E B"]
    pairs = [{"prompt": word, "completion": word[::-1]} for word in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


def metrics(run: Path) -> bytes:
    return (run / "metrics.jsonl").read_bytes()


def test_a_run_with_relative_paths_is_resumed_and_read_elsewhere(here, project, monkeypatch):
    env = "env={name: metamath, options: {source: rows.jsonl}}"
    words = ["train", "--no-report", "grpo", "model=tuned", env, *RUN_WORDS]
    here(*words, "num_steps=2", "--run", "whole")
    here(*words, "num_steps=1", "--run", "part")
    stored = (project / "part/config.yaml").read_text()
    monkeypatch.chdir("../elsewhere")
    # Another file of that name, which is not meant.
    Path("rows.jsonl").write_text('{"query": "B?", "response": "The answer is: 7"}\n')
    said = here("train", "--no-report", "--resume", "../project/part", "num_steps=2")
    # A copy of a project would go on with the files of the original: that is said.
    assert f"relative paths and modules: those of {project}, where" in said
    assert metrics(project / "part") == metrics(project / "whole")
    told = (project / "part/config.yaml").read_text()
    assert told == stored.replace("num_steps: 1", "num_steps: 2")
    assert [start["folder"] for start in read_records(project / "part", "starts")] == [
        str(project),
        str(project),
    ]
    assert "on 4 tasks" in here("eval", "../project/part", "-n", "4")
    monkeypatch.chdir("../project")
    said = here("train", "--no-report", "--resume", "part", "num_steps=3")
    assert "relative paths" not in said


def test_an_environment_of_the_folder_is_found_elsewhere(here, project, monkeypatch):
    own = "from moored.envs.bandit import Bandit\n\n\nclass Mine(Bandit):\n    pass\n"
    (project / "env_of_the_project.py").write_text(own)
    words = [*RUN_WORDS, "num_steps=1", "env=env_of_the_project:Mine"]
    here("train", "--no-report", "grpo", "model=tuned", *words, "--run", "run")
    monkeypatch.chdir("../elsewhere")
    monkeypatch.delitem(sys.modules, "env_of_the_project")
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(project)])
    here("train", "--no-report", "--resume", "../project/run", "num_steps=2")
    assert len(read_records(project / "run")) == 2


def test_an_environment_that_is_typed_here_is_that_of_the_current_folder(
    here, project, monkeypatch
):
    own = "from moored.envs.bandit import Bandit\n\n\nclass Mine(Bandit):\n    pass\n"
    (project / "env_of_both.py").write_text(own)
    words = [*RUN_WORDS, "num_steps=1", "env=env_of_both:Mine"]
    here("train", "--no-report", "grpo", "model=tuned", *words, "--run", "run")
    monkeypatch.chdir("../elsewhere")
    Path("env_of_both.py").write_text(f"{own}\n\nclass Other(Mine):\n    pass\n")
    for given in (["env_of_both:Other"], []):
        monkeypatch.delitem(sys.modules, "env_of_both")
        monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(project)])
        env = [word for name in given for word in ("--env", name)]
        assert "on 2 tasks" in here("eval", "../project/run", "-n", "2", *env)
        is_here = Path(sys.modules["env_of_both"].__file__ or "").parent == Path.cwd()
        assert is_here == bool(given)


def test_an_environment_is_found_from_a_folder_that_was_deleted(project, monkeypatch):
    (project / "run").mkdir()
    start = {"schema": 1, "step": 0, "folder": str(project)}
    (project / "run/starts.jsonl").write_text(json.dumps(start) + "\n")
    (project / "gone").mkdir()
    monkeypatch.chdir("gone")
    (project / "gone").rmdir()
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(project)])
    import_from_start(project / "run")
    assert sys.path[-1] == str(project)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_kill_at_the_start_leaves_no_run_that_forgot_its_folder(
    here, project, monkeypatch, command
):
    words = ["sft", "tuned", "dialogues=pairs.jsonl", *SFT_WORDS]
    if command == "train":
        env = "env={name: metamath, options: {source: rows.jsonl}}"
        words = ["train", "--no-report", "grpo", "model=tuned", env, *RUN_WORDS, "num_steps=1"]

    def killed(*_: object) -> None:
        raise SystemExit(137)

    for step in ("append", "write_config"):
        with monkeypatch.context() as patch:
            patch.setattr(RunLog, step, killed)
            here(*words, "--run", "run", expect=137)
        assert not (project / "run/config.yaml").exists()
    here(*words, "--run", "run")
    assert noted_folder("run") == project
    assert len(read_records("run")) >= 1


def test_a_warm_start_is_resumed_elsewhere_and_with_its_dialogues_moved(here, project, monkeypatch):
    here("sft", "tuned", "dialogues=pairs.jsonl", *SFT_WORDS, "--run", "whole")
    wanted = metrics(project / "whole")
    for name in ("part", "moved"):
        shutil.copytree("whole", name)
        shutil.rmtree(f"{name}/checkpoints/step_000003")
    monkeypatch.chdir("../elsewhere")
    # Another model of that name, which is not meant.
    Path("tuned").mkdir()
    Path("tuned/config.json").write_text('{"max_position_embeddings": 16}')
    said = here("sft", "--resume", "../project/part")
    assert f"relative paths and modules: those of {project}, where" in said
    assert metrics(project / "part") == wanted
    (project / "pairs.jsonl").rename("renamed.jsonl")
    said = here("sft", "--resume", "../project/moved", expect=2)
    assert "say where it is now: dialogues=FILE" in said
    assert "changed: dialogues from" in here(
        "sft", "--resume", "../project/moved", "dialogues=renamed.jsonl"
    )
    assert metrics(project / "moved") == wanted
    # From now on it is found there from any folder.
    config = yaml.safe_load((project / "moved/config.yaml").read_text())
    assert config["dialogues"] == str(Path("renamed.jsonl").absolute())
