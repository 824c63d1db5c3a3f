"""`moored plan` prints what a run needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moored.cli.main import main
from tests.warm import run_warm

PROBE = """
import sys
from moored.cli.main import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run `moored words…` where there is no GPU; its exit code, what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)
    # What a developer has downloaded comes before the table.
    monkeypatch.setattr("moored.models.find.downloaded_folder", lambda name: None)
    monkeypatch.setattr("moored.engine.gpu.present_gpu", lambda device="auto": None)

    def run_command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moored", *words])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        return int(left.value.code or 0), shown.out, shown.err

    return run_command


def cells(out: str, name: str) -> list[str]:
    """Of the line of a table that begins with this name."""
    (line,) = [line for line in out.splitlines() if line.startswith(name + "  ")]
    return line.removeprefix(name).split()


def test_a_plan_is_a_table_of_parts_and_phases_and_a_verdict(run):
    code, out, _ = run("plan", "sokoban", "ppo", "qwen2.5-3b", "algorithm.kl_coef=0.001")
    assert code == 0
    assert "3.09 billion parameters" in out and "assumed, because there is none here" in out
    # 300 + 5 x 400 + 4 observations of 60.
    assert "8 prompts x 16 episodes of 2,540 tokens" in out
    # 2 bytes of 3.086 billion parameters, pinned as a power of two.
    assert "main memory: 8.0 GiB for the reference" in out
    assert cells(out, "GiB") == ["rollout", "scoring", "reference", "update"]
    # 2 and 12 bytes for each parameter.
    assert cells(out, "policy weights") == ["5.75"] * 4
    assert cells(out, "critic optimiser") == ["34.49"] * 4
    assert cells(out, "reference weights") == ["5.75"]
    assert cells(out, "keys and values") == ["22.64"] * 2
    # 28.7 x 4 and 9.0, activations and work of an update.
    assert cells(out, "total")[-1] == "123.65"
    assert len(cells(out, "seconds")) == 3
    assert out.splitlines()[-1].startswith("fits: ")


def test_what_does_not_fit_has_exit_code_1_and_options_that_help(run):
    code, out, _ = run("plan", "sokoban", "ppo", "qwen2.5-7b", "--gpu", "h100")
    assert code == 1
    assert "seconds: planned only for what fits" in out
    assert "does not fit: " in out and "optimizer.lora_rank=64" in out


def test_ranks_of_one_machine_are_planned(run):
    words = ["sokoban", "grpo", "qwen2.5-7b", "engine.kind=torchrun", "rollout.num_groups=64"]
    code, out, _ = run("plan", *words, "--gpus", "8", "--gpu", "h200")
    assert code == 0 and "8 x h200" in out
    # 12 bytes of 7.616 billion parameters over 8 ranks; 2 bytes of all of them.
    assert cells(out, "policy optimiser") == ["10.64"] * 3
    assert cells(out, "sampler weights") == ["14.19"] * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nano"], "'nano' is a model, not a preset; write model=nano"),
        (["sokoban", "sudoku"], "'sudoku' is an environment, not a preset; write env=sudoku"),
        (["model=qwen2.5-0.5b"], "is a preset; write qwen2.5-0.5b without model="),
    ],
)
def test_a_word_of_another_kind_is_told_how_it_is_written(run, words, said):
    code, out, error = run("plan", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_json_has_the_same_numbers(run):
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-7b", "--gpu", "h100", "--json")
    found = json.loads(out)
    assert code == 1
    assert not found["fits"] and found["seconds"] is None
    assert found["num_parameters"] == 7_615_616_512
    assert found["memory_gib"]["update"]["policy weights"] == pytest.approx(14.185, abs=0.001)
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--turns", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"]
    assert found["trajectory_tokens"] == 300 + 2 * 400 + 60
    assert found["step_s"] == pytest.approx(sum(found["seconds"].values()), abs=1e-3)


def test_lengths_can_be_given(run):
    words = ["--turns", "3", "--prompt-tokens", "500", "--reply-tokens", "100", "--json"]
    found = json.loads(run("plan", "bandit", "grpo", "model=nano", *words)[1])
    assert (found["prompt_tokens"], found["turns"], found["reply_tokens"]) == (500, 3, 100)


@pytest.mark.parametrize(
    "words", [("--reply-tokens", "1000"), ("--turns", "1000"), ("--prompt-tokens", "9999")]
)
def test_episodes_that_cannot_be_are_not_planned(run, words):
    code, out, err = run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--gpu", "h100", *words)
    assert (code, out) == (2, "")
    assert "rollout.max_context" in err and words[0] in err


def test_a_context_that_training_would_refuse_is_not_planned(run, tmp_path):
    described = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 64}
    described |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    described |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(described))
    code, _, err = run("plan", "sokoban", "grpo", "model=.", "--gpu", "h200")
    assert code == 2 and "max_context = 2048 is longer than the 512 tokens that this llama" in err
    described["rope_parameters"] = {"rope_type": "yarn", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(described))
    _, _, err = run("plan", "sokoban", "grpo", "model=.", "--gpu", "h200")
    assert "max_context" not in err


def test_layers_that_look_back_too_few_tokens_are_not_planned(run, tmp_path):
    described = {"model_type": "mistral", "sliding_window": 512, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(described))
    code, out, err = run("plan", "sokoban", "grpo", "model=.", "--gpu", "h200")
    assert (code, out) == (2, "")
    assert "a mistral model with layers that look back 512 tokens only cannot be used" in err


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 32768),
        ("qwen/qwen3-0.6b", 40960),
        ("smollm2", 8192),
    ],
)
def test_a_context_longer_than_a_hub_id_was_made_for_is_not_planned(run, model, longest):
    words = ["plan", "sokoban", "grpo", f"model={model}", "--gpu", "h200"]
    _, _, err = run(*words, f"rollout.max_context={longest}")
    assert err == ""
    code, out, err = run(*words, f"rollout.max_context={longest + 1}")
    assert (code, out) == (2, "")
    assert f"max_context = {longest + 1} is longer than the {longest} tokens that this" in err


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"])
def test_a_hub_id_that_scales_its_angles_or_is_not_known_is_planned_at_any_length(run, model):
    words = ["rollout.max_context=140000", "--gpu", "h200"]
    _, _, err = run("plan", "sokoban", "grpo", f"model={model}", *words)
    assert err == ""


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("config", 'env=[{name: "os:system", options: {command: "touch ran"}}]'),
        ("config", 'env=[{name: "gymnasium", options: {oracle: "trap:oracle"}}]'),
        ("plan", 'env=[{name: "os:system", options: {command: "touch ran"}}]'),
        ("plan", 'env=[{name: "gymnasium", options: {oracle: "trap:oracle"}}]'),
        ("plan", "algorithm.name=trap:ALGORITHM"),
        ("plan", "algorithm.advantage=trap:advantage"),
    ],
)
def test_no_code_that_a_configuration_names_runs_to_read_it(run, monkeypatch, command, word):
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    Path("trap.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    words = ["--gpu", "h200"] if command == "plan" else []
    code, _, err = run(command, "sokoban", "grpo", word, *words)
    assert not Path("ran").exists()
    if command == "plan":
        assert code == 2 and "a plan runs no code that a configuration names" in err
    else:
        assert (code, err) == (0, "")


def test_a_plan_for_an_environment_of_ones_own_asks_for_its_turns(run):
    words = ["plan", "grpo", "env=my_env:MyEnv", "--gpu", "h200"]
    code, _, err = run(*words)
    assert code == 2 and "as 'my_env:MyEnv' does; to plan all the same, give --turns" in err
    assert run(*words, "--turns", "2")[0] == 0


def test_programs_are_planned_where_no_sandbox_is(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, _ = run("plan", "code", "grpo", "--gpu", "h200")
    assert code == 0


def test_as_many_turns_are_planned_as_the_context_has_room_for(run):
    words = ["rollout.max_context=1024", "--reply-tokens", "400", "--json"]
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--gpu", "h100", *words)
    found = json.loads(out)
    # 300 + 400 leave 324 tokens, which are too few for a second turn.
    assert code == 0 and (found["turns"], found["trajectory_tokens"]) == (1, 700)


def test_a_gpu_can_be_described(run):
    code, out, _ = run("plan", "sokoban", "grpo", "--memory-gib", "10")
    assert code == 0 and "10.0 GiB (as given)" in out
    assert run("plan", "sokoban", "grpo", "--gpu", "h200", "--memory-gib", "0.5")[0] == 1


def test_the_gpu_here_is_the_default(run, monkeypatch):
    here = ("NVIDIA Odd 1", 24 * 2**30)
    monkeypatch.setattr("moored.engine.gpu.present_gpu", lambda device="auto": here)
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-0.5b")
    assert code == 0
    assert "GPU: NVIDIA Odd 1, 24.0 GiB (the one here)" in out
    assert "seconds: the rates of NVIDIA Odd 1 are not known" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h2000"], "did you mean 'h200'?"),
        (["model=org/unknown"], "'org/unknown' is not in the table"),
        (["model=nanoo"], "did you mean 'nano'?"),
        (["engine.device=cpu"], "engine.device is cpu"),
        (["engine.kind=endpoint"], "engine.kind = endpoint"),
        (["engine.kind=ray"], "engine.kind = ray"),
        (["engine.kind=torchrun"], "--gpus"),
        (["smok"], "did you mean 'smoke'?"),
        (["env=sokobn"], "did you mean 'sokoban'?"),
    ],
)
def test_a_mistake_is_one_line(run, words, message):
    code, out, error = run("plan", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("moored: ") and message in error


def test_rollouts_of_the_plain_sampler_are_left_out_of_seconds(run):
    words = ("plan", "sokoban", "grpo", "qwen2.5-1.5b", "engine.sampler=plain")
    assert "a step: " not in run(*words)[1]
    record = json.loads(run(*words, "--json")[1])
    assert record["step_s"] is None and "decode" not in record["seconds"]


def test_a_plan_for_a_named_gpu_does_not_wait_for_torch(tmp_path):
    words = ["plan", "sokoban", "grpo", "--gpu", "h200"]
    done = run_warm(words, code=PROBE, cwd=tmp_path, slim=True)
    assert (done.returncode, done.stderr) == (0, "False\n")
