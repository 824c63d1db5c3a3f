"""`moored sft`: mistakes in one sentence before torch is loaded; what it prints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.cli.sft_progress import SftSummary, comparison_lines
from moored.errors import ConfigError
from tests.warm import run_warm

ROOT = Path(__file__).parents[3]
PROBE = """
import sys
from moored.cli.main import main
try:
    main()
finally:
    print(sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""
TINY = ["env=bandit", "batch_tokens=512", "checkpoint_every=2", "evaluation.num_dialogues=2"]
TINY += ["evaluation.num_tasks=2", "evaluation.max_response_tokens=8"]

COUNTING = "{name: tests.unit.sft.lessons:Counting, options: {method: reasoning}}"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`moored sft …` in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moored", "sft", *words])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nano"], "there is nothing to learn from; give env=NAME or dialogues=FILE"),
        (["nano", "env=bandt"], "unknown environment 'bandt'; did you mean 'bandit'?"),
        (["nano", "env.0.options.x=1", "env=bandit"], "env"),
        (["nanoo", "env=bandit"], "neither embedded nor a folder; did you mean 'nano'?"),
        (["qwen2.5-0.5", "env=bandit"], "nor a preset of one; did you mean 'qwen2.5-0.5b'?"),
        (["nano", "mini", "env=bandit"], "one model can be taught at a time, got nano and mini"),
        (["nano", "model=mini", "env=bandit"], "the model is 'nano' by its first word and another"),
        (["nano", "sudoku"], "'sudoku' is an environment, not a model; write env=sudoku"),
        (["nano", "dialogues=none.jsonl"], "cannot read dialogues 'none.jsonl': No such file"),
        (["nano", "dialogues=empty.jsonl"], "dialogues 'empty.jsonl': the file is empty"),
        (["nano", "dialogues=mute.jsonl"], "'mute.jsonl', line 1 has no reply to learn"),
        (["nano", "env=bandit", "max_context=4096"], "longer than the 2048 tokens that model"),
        (["nano", "env=bandit", "num_step=3"], "unknown option 'num_step'"),
        (["nano", "env=tests.unit.sft.lessons:Mute"], "has no oracle to learn from (mute: no"),
        (["nano", f"env={COUNTING}"], "reasoning() must return a text, got 7 of type int; return"),
        (["none.yaml"], "cannot read configuration 'none.yaml'"),
        (["--resume", "none"], "'none' is not a run directory: it has no config.yaml"),
        (["num_steps=3", "--resume", "none"], "'none' is not a run directory: it has no config"),
        (["mini", "--resume", "begun"], "--resume takes options only, got 'mini'; leave it out"),
        (["--resume", "begun", "--run", "x"], "goes on in 'begun' itself; leave --run 'x' out"),
        (["--resume", "trained"], "not a run of `moored sft`; for one of `moored train`: moored t"),
        (["--resume", "emptied"], "'emptied/config.yaml' is empty, and a run cannot be resumed w"),
        (["num_steps=3", "--resume", "begun"], "num_steps cannot change when a warm start is res"),
        (["env=sudoku", "--resume", "begun"], "only workers and checkpoint_every change none"),
        (["worker=2", "--resume", "begun"], "unknown option 'worker'; did you mean 'workers'?"),
        (["workers=-1", "--resume", "begun"], "workers"),
        (["--resume", "edited"], "mute.jsonl' were edited since the warm start began"),
        (
            ["--resume", "edited", "dialogues=empty.jsonl"],
            "empty.jsonl' are not those that the warm start began with",
        ),
        (
            ["--resume", "edited", "dialogues=none.jsonl"],
            "there is no file 'none.jsonl' to learn the dialogues of; put it back, or say where",
        ),
        (["nano", "env=bandit", "--run", "taken"], "'taken' already holds a run"),
    ],
)
def test_a_mistake_is_one_sentence(command, tmp_path, words, why):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "mute.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    (tmp_path / "emptied").mkdir()
    (tmp_path / "emptied" / "config.yaml").write_text("")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("command: sft\nenv: bandit\n")
    (tmp_path / "edited").mkdir()
    dialogues = f"dialogues: {tmp_path / 'mute.jsonl'}\n"
    (tmp_path / "edited" / "config.yaml").write_text(f"command: sft\n{dialogues}")
    noted = '{"schema": 1, "step": 0, "dialogues_sha256": "0"}\n'
    (tmp_path / "edited" / "starts.jsonl").write_text(noted)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text("seed: 0\nnum_steps: 3\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("")
    code, shown, said = command(*words)
    assert code == 2 and shown == ""
    assert said.startswith("moored: ") and why in said and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_found_without_torch(tmp_path):
    words = ["sft", "nano", "env=bandit", "max_context=4096"]
    done = run_warm(words, code=PROBE, cwd=tmp_path, slim=True)
    assert done.returncode == 2 and done.stderr.endswith("[]\n")


def test_ranks_that_were_not_started_are_not_blamed_on_another_command(command):
    pytest.importorskip("transformers")
    code, shown, said = command("nano", *TINY, "engine.kind=torchrun")
    assert code == 2 and shown == "" and said.count("\n") == 1
    assert said.endswith("start the command with torchrun --nproc-per-node N -m -- moored …\n")


def test_figures_are_compared_line_by_line():
    result = SftSummary(
        run="r",
        model="r/model",
        steps=3,
        reason="",
        before={"loss": 2.0, "success_rate": 0.0},
        after={"loss": 0.5, "success_rate": 0.25},
    )
    assert comparison_lines(result) == [
        "held-out loss: 2.000 before, 0.500 after",
        "success: 0.000 before, 0.250 after",
    ]


def test_a_run_says_what_it_does_and_json_is_all_that_stdout_holds(command, tmp_path):
    pytest.importorskip("transformers")
    code, shown, said = command("nano", *TINY, "num_steps=2", "--json")
    assert code == 0
    found = json.loads(shown)
    assert found["run"] == "runs/sft-nano" and found["model"] == "runs/sft-nano/model"
    assert found["steps"] == 2 and found["reason"] == "all 2 steps done"
    measured = {"loss", "validity_rate", "success_rate", "reward_mean"}
    assert set(found["before"]) == set(found["after"]) == measured
    assert "each step: up to 512 tokens of episodes of bandit (learning rate 0.001)\n" in said
    assert "steps: 2, tried on 2 tasks before and after\n" in said
    assert "step 1: loss " in said
    # All steps are done: going on writes the model again and compares the same figures.
    code, again, _ = command("--resume", "runs/sft-nano", "--json")
    assert code == 0 and json.loads(again) == found
    # A file gives the same run as its options do.
    (tmp_path / "lesson.yaml").write_text((tmp_path / "runs/sft-nano/config.yaml").read_text())
    code, shown, _ = command("lesson.yaml", "--run", "copy")
    assert code == 0 and shown.endswith("model: copy/model\nrun directory: copy\n")
    weights = [tmp_path / run / "model/model.safetensors" for run in ("copy", "runs/sft-nano")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_whose_checkpoints_were_deleted_does_not_begin_again_without_a_word(
    command, tmp_path
):
    pytest.importorskip("transformers")
    code, shown, _ = command("nano", *TINY, "num_steps=2", "--run", "r", "--json")
    assert code == 0
    model, log = tmp_path / "r/model", tmp_path / "r/metrics.jsonl"
    shutil.rmtree(tmp_path / "r/checkpoints")
    # All steps are done: the model stays, and its figures are told again.
    written = (model / "model.safetensors").stat().st_mtime_ns
    code, again, _ = command("--resume", "r", "--json")
    assert code == 0 and json.loads(again) == json.loads(shown)
    assert (model / "model.safetensors").stat().st_mtime_ns == written
    # One is missing: beginning again would write over the model of the first.
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    code, _, said = command("--resume", "r")
    assert code == 2 and said.count("\n") == 1
    assert "'r' has logged 1 of its 2 steps and has no checkpoint to go on from" in said
    assert "moored sft r/model" in said
    shutil.rmtree(model)
    code, shown, _ = command("--resume", "r")
    assert code == 0 and "all 2 steps done" in shown
    assert "no checkpoint was found, so the run begins again; 2 logged steps done again\n" in shown


def test_an_oracle_that_teaches_nothing_is_named_in_one_line(command, monkeypatch):
    pytest.importorskip("transformers")

    def build(config, path):
        raise ConfigError("as far as this goes")

    monkeypatch.setattr("moored.sft.loop.build_sft", build)
    code, shown, said = command("nano", "env=tests.unit.sft.lessons:Useless")
    assert code == 2 and shown == "" and said.count("\n") == 2
    assert said.startswith("moored: the oracle of environment 'tests.unit.sft.lessons:Useless' ear")


def test_a_run_says_at_which_step_it_was_measured_last_and_how_it_goes_on(command, monkeypatch):
    pytest.importorskip("transformers")
    from moored.sft import loop

    def stop(run, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return do_step(run, step)

    do_step = loop.sft_step
    with monkeypatch.context() as patch:
        patch.setattr(loop, "sft_step", stop)
        code, shown, _ = command("nano", *TINY, "num_steps=4", "evaluation.every=2", "--run", "r")
    assert code == 143 and "stopped on request after step 3\n" in shown
    assert "after: measured at step 2, the last time before the end\n" in shown

    def interrupt(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "build_sft", interrupt)
        code, shown, said = command("--resume", "r")
    assert code == 130 and shown == ""
    assert said == "stopped while the run was loaded; go on with: moored sft --resume r\n"
    code, shown, _ = command("--resume", "r", "workers=0")
    assert code == 0 and "changed: workers from null to 0\n" in shown
    assert "after: measured" not in shown
