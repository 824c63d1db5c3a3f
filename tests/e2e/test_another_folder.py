"""A run goes on from any folder as it would have gone on where it was started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moored.runlog.log import read_records

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


def stored(run: Path) -> dict:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_a_run_with_relative_paths_goes_on_elsewhere_and_where_it_was_moved_to(
    here, project, monkeypatch
):
    env = "env={name: metamath, options: {source: rows.jsonl}}"
    words = ["train", "--no-report", "grpo", "model=tuned", env, *RUN_WORDS]
    here(*words, "num_steps=3", "--run", "whole")
    here(*words, "num_steps=1", "--run", "part")
    assert stored(project / "part")["model"] == str(project / "tuned")
    monkeypatch.chdir("../elsewhere")
    # Another file of that name, which is not meant.
    Path("rows.jsonl").write_text('{"query": "B?", "response": "The answer is: 7"}\n')
    here("train", "--no-report", "--resume", "../project/part", "num_steps=2")
    assert "on 4 tasks" in here("eval", "../project/part", "-n", "4")
    moved = project.rename(project.parent / "moved")
    resume = ["train", "--no-report", "--resume", "../moved/part", "num_steps=3"]
    said = here(*resume, expect=2)
    assert f"there is no folder {str(project / 'tuned')!r}" in said
    assert "train --resume ../moved/part model=… env.0.options.source=…" in said
    assert said.count("\n") == 1
    places = ["model=../moved/tuned", "env.0.options.source=../moved/rows.jsonl"]
    here(*resume, *places)
    assert metrics(moved / "part") == metrics(moved / "whole")
    now = stored(moved / "part")
    assert now["model"] == str(moved / "tuned")
    assert now["env"][0]["options"] == {"source": str(moved / "rows.jsonl")}


def test_an_environment_in_a_file_is_found_elsewhere_and_its_records_have_no_folder(
    here, project, monkeypatch
):
    own = "from moored.envs.bandit import Bandit\n\n\nclass Mine(Bandit):\n    pass\n"
    (project / "env_of_the_project.py").write_text(own)
    words = [*RUN_WORDS, "num_steps=1", "env=./env_of_the_project.py:Mine"]
    here("train", "--no-report", "grpo", "model=tuned", *words, "--run", "run")
    monkeypatch.chdir("../elsewhere")
    monkeypatch.delitem(sys.modules, "env_of_the_project")
    monkeypatch.setattr("sys.path", [p for p in sys.path if p != str(project)])
    here("train", "--no-report", "--resume", "../project/run", "num_steps=2")
    assert len(read_records(project / "run")) == 2


def test_a_warm_start_goes_on_elsewhere_and_with_its_dialogues_moved(here, project, monkeypatch):
    here("sft", "tuned", "dialogues=pairs.jsonl", *SFT_WORDS, "--run", "whole")
    wanted = metrics(project / "whole")
    for name in ("part", "moved"):
        shutil.copytree("whole", name)
        shutil.rmtree(f"{name}/checkpoints/step_000003")
    monkeypatch.chdir("../elsewhere")
    # Another model of that name, which is not meant.
    Path("tuned").mkdir()
    Path("tuned/config.json").write_text('{"max_position_embeddings": 16}')
    here("sft", "--resume", "../project/part")
    assert metrics(project / "part") == wanted
    (project / "pairs.jsonl").rename("renamed.jsonl")
    (project / "tuned").rename("theirs")
    said = here("sft", "--resume", "../project/moved", expect=2)
    assert "say where it is now: dialogues=FILE" in said
    said = here("sft", "--resume", "../project/moved", "dialogues=renamed.jsonl", expect=2)
    assert "moored sft --resume ../project/moved model=…" in said
    said = here("sft", "--resume", "../project/moved", "dialogues=renamed.jsonl", "model=theirs")
    assert "changed: dialogues from" in said and "changed: model from" in said
    assert metrics(project / "moved") == wanted
    now = stored(project / "moved")
    assert now["dialogues"] == str(Path("renamed.jsonl").absolute())
    assert now["model"] == str(Path("theirs").absolute())
