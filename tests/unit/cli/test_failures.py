"""What goes wrong with files and folders is one sentence with a remedy, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moored.cli import main as cli
from moored.config import dump_config, load_config
from moored.engine.checkpoint import load_checkpoint
from moored.errors import RunLogError
from moored.models.find import embedded_models
from moored.runlog.log import check_folder
from tests.warm import MAIN, WarmProcess, main_on_full_disk, run_warm

ROOT = Path(__file__).parents[3]


@pytest.fixture
def said(monkeypatch, capsys, tmp_path):
    """Runs a command that fails in an empty folder; returns the sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["moored", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, "")
        assert err.startswith("moored: ") and err.count("\n") == 1
        return err

    return run


def test_eval_of_a_run_that_does_not_exist_says_so(said, tmp_path):
    assert "there is no folder 'runs/nope'" in said("eval", "runs/nope")
    (tmp_path / "runs" / "hope").mkdir(parents=True)
    assert "did you mean 'hope'?" in said("eval", "runs/nope")
    assert "is empty" in said("eval", "runs/hope")


def test_eval_takes_a_sampler_for_a_model_in_this_process_alone(said):
    told = said("eval", "nano", "--env", "sokoban", "--sampler", "quick")
    assert "engine.sampler" in told and "vllm" in told
    words = ("--sampler", "vllm", "--endpoint", "http://127.0.0.1:9/v1")
    told = said("eval", "nano", "--env", "sokoban", *words)
    assert "--sampler is for a model in this process; leave it out with --endpoint" in told


def test_eval_of_a_run_without_a_checkpoint_says_so_before_torch_is_imported(said, tmp_path):
    run = tmp_path / "runs" / "new"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(load_config()))
    assert "'runs/new' has no checkpoint yet; let it run further first" in said("eval", "runs/new")


def test_a_run_whose_model_is_gone_is_told(said, tmp_path):
    run = tmp_path / "runs" / "old"
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    gone = f"{tmp_path}/gone"
    (run / "config.yaml").write_text(dump_config(load_config(None, [f"model={gone}"])))
    told = said("eval", "runs/old")
    assert f"there is no folder {gone!r}" in told and "train --resume runs/old model=…" in told


COMMANDS = {
    "train": "train env={} --run run",
    "eval": "eval nano --env {}",
    "sft": "sft nano env={} --run run",
    "play": "play {}",
    "check-env": "check-env {}",
    "serve-env": "serve-env {}",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_mistyped_game_is_refused_before_any_episode(said, tmp_path, command):
    pytest.importorskip("textarena")
    sentence = said(*command.format("textarena:TicTakToe-v0").split())
    assert "there is no game 'TicTakToe-v0'; did you mean 'TicTacToe-v0'?" in sentence
    assert not any(tmp_path.iterdir())


NOBODY = "http://127.0.0.1:9"
GONE = "start the server first, or check the address"


@pytest.mark.parametrize(
    ("env", "package", "sentence"),
    [
        ("textarena:Nope", "textarena", "no game 'Nope'; choose one of 2048-v0, Alquerque-v0,"),
        ("gymnasium:FrozenLak-v1", "gymnasium", "doesn't exist. Did you mean: `FrozenLake`?"),
        ("reasoning_gym:chain_sun", "reasoning_gym", "'chain_sun'; did you mean 'chain_sum'?"),
        ("textworld:nope.z8", "textworld", "there is no file or folder 'nope.z8'"),
        ("verifiers:nope", "verifiers", "verifiers: nope cannot be loaded"),
        (f"remote:{NOBODY}", "httpx2", GONE),
        (f"openenv:{NOBODY}", "websockets", GONE),
        (f"lean:{NOBODY}", "httpx2", GONE),
        ("remote:nope", "httpx2", "remote: url must look like http://host:8000, got 'nope'"),
    ],
)
@pytest.mark.parametrize("command", ["train env={}", "check-env {}"])
def test_a_wrong_name_or_address_is_one_sentence(said, command, env, package, sentence):
    pytest.importorskip(package)
    assert sentence in said(*command.format(env).split())


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_state_of_a_checkpoint_names_the_one_before(tmp_path, damage):
    folder = tmp_path / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    if damage == "cut":
        (folder / "state.json").write_text('{"step":')
    with pytest.raises(RunLogError, match="delete the folder 'step_000002', then the checkpoint"):
        load_checkpoint(tmp_path, None)  # pyright: ignore[reportArgumentType]


def test_damaged_weights_of_a_checkpoint_name_the_one_before(said, tmp_path):
    run = tmp_path / "run"
    folder = run / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (folder / "policy.safetensors").write_bytes(b"\0" * 100)
    (run / "config.yaml").write_text(dump_config(load_config(None, ["env=bandit"])))
    sentence = said("eval", "run", "-n", "1")
    assert "policy.safetensors' is damaged or missing" in sentence
    assert "delete the folder 'step_000002'" in sentence


def test_a_folder_without_permission_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(RunLogError, match="closed' is not writable; choose another folder"):
        check_folder(tmp_path / "closed" / "run")


def test_a_run_directory_below_a_file_is_refused_by_name(said, tmp_path):
    (tmp_path / "file").write_text("")
    assert "file' is not a folder; choose another folder" in said(
        "train", "smoke", "--run", "file/run"
    )


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space, or write to another disk"),
        (errno.EACCES, "choose another folder, or change its permissions"),
        (errno.EROFS, "choose another folder"),
    ],
)
def test_a_disk_that_fails_anywhere_is_told_in_one_sentence(said, monkeypatch, number, remedy):
    def fail(**_: object) -> None:
        raise OSError(number, os.strerror(number), "somewhere/file")

    monkeypatch.setattr(cli, "app", fail)
    assert f"'somewhere/file': {os.strerror(number)}; {remedy}" in said("envs")


def test_a_gpu_that_is_full_when_a_model_is_loaded_is_told_in_one_sentence(said, monkeypatch):
    def fail(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB.\nGPU 0 has")

    monkeypatch.setattr(cli, "app", fail)
    assert "out of GPU memory; lower engine.micro_batch_tokens" in said("envs")


@pytest.mark.parametrize(
    "bug", [FileNotFoundError(errno.ENOENT, "a bug"), RuntimeError("shapes do not match")]
)
def test_a_bug_keeps_its_traceback(monkeypatch, bug):
    def fail(**_: object) -> None:
        raise bug

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(type(bug)):
        cli.main()


def test_a_full_disk_ends_diagnose_with_one_sentence(tmp_path):
    rows = [
        {"step": 1, "prompt": f"p{i % 2}", "response": f"<think>t{i}</think>", "reward": 0}
        for i in range(8)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["diagnose", "a.jsonl", "--model", "nano", "--html", "page.html"]
    done = run_warm(words, code=main_on_full_disk(2000), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("moored: ") and "page.html" in last
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_an_evaluation_without_a_traceback(tmp_path):
    # It says when the episodes begin.
    entry = "import moored.evaluate, sys; old = moored.evaluate.roll_out\n"
    entry += "def told(*a, **k):\n    print('playing', flush=True)\n    return old(*a, **k)\n"
    entry += "moored.evaluate.roll_out = told\n"
    model = Path(shutil.copytree(embedded_models()["nano"], tmp_path / "model"))
    words = ["eval", str(model), "--env", "sokoban", "-n", "4000"]
    process = WarmProcess(words, code=entry + MAIN, cwd=tmp_path)
    assert process.stdout.readline() == "playing\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "stopped; nothing was measured\n")


INTERRUPTED_IMPORT = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.2)
print("imported", flush=True)
class Env:
    def __init__(self, *_):
        time.sleep(50)
    open = __init__
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "nano", "--env", "heavy:Env"], "stopped; nothing was measured\n"),
        (["diagnose", "a.jsonl", "--reader", "heavy:Env"], ""),
        (["gradients", "grpo", "env=heavy:Env"], ""),
        (["check-env", "heavy:Env"], ""),
    ],
)
def test_ctrl_c_waits_for_the_end_of_an_import_in_every_command(tmp_path, words, told):
    (tmp_path / "heavy.py").write_text(INTERRUPTED_IMPORT)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    done = run_warm(words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\n", told)


def test_ctrl_c_while_the_command_itself_is_imported_is_no_traceback():
    code = (
        "import builtins, os, runpy, signal\n"
        "old = builtins.__import__\n"
        "def told(name, *args, **options):\n"
        "    if name == 'typer':\n"
        "        builtins.__import__ = old\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return old(name, *args, **options)\n"
        "builtins.__import__ = told\n"
        "runpy.run_module('moored', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "envs"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
