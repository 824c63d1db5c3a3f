"""`moored plan` prints what a run needs; `moored train` refuses what cannot fit."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from moored.cli.main import main
from moored.config import Config, load_config
from moored.errors import MooredError
from moored.plan import refuse_what_cannot_fit
from moored.plan.gpus import GPUS, Gpu
from moored.presets import read_presets
from tests.warm import run_warm

PROBE = """
import sys
from pathlib import Path
from moored.cli.main import main
from moored.config import load_config
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


def test_a_plan_is_a_table_of_parts_and_phases_and_a_verdict(run):
    code, out, _ = run("plan", "sokoban", "ppo", "qwen2.5-3b", "algorithm.kl_coef=0.001")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "model: Qwen/Qwen2.5-3B-Instruct, 3.09 billion parameters, bfloat16"
    assert lines[1] == (
        "GPU: h200, 139.8 GiB (assumed, because there is none here; --gpu names another)"
    )
    # 300 + 5 x 400 + 4 observations of 60.
    assert lines[2] == (
        "each step: 8 prompts x 16 = 128 episodes of 2,540 tokens: a prompt of 300, then 5 x 400 "
        "and 4 x 60 between them"
    )
    # 2 bytes of 3.086 billion parameters, pinned as a power of two.
    assert "main memory: 8.0 GiB for the reference" in lines
    assert "memory, GiB          rollout   scoring reference    update" in lines
    # 2 and 12 bytes for each parameter.
    assert "policy weights          5.75      5.75      5.75      5.75" in lines
    assert "critic optimiser       34.49     34.49     34.49     34.49" in lines
    assert "reference weights                           5.75" in lines
    assert any(line.startswith("keys and values        22.64") for line in lines)
    assert "not counted: environments, looks at collapse, evaluations, logging" in lines
    assert lines[-1].startswith("fits: ")


def test_main_memory_is_said_part_by_part(run):
    words = ["plan", "sokoban", "grpo", "qwen2.5-7b", "optimizer.states=host", "--gpu", "h200"]
    _, out, _ = run(*words)
    said = "main memory: 85.1 GiB for the optimiser, 16.0 GiB for the reference"
    assert said in out.splitlines()
    assert "main memory" not in run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--gpu", "h200")[1]


def test_what_does_not_fit_has_advice_and_exit_code_1(run):
    code, out, _ = run("plan", "sokoban", "ppo", "qwen2.5-7b", "--gpu", "h100")
    assert code == 1
    lines = out.splitlines()
    assert "GPU: h100, 79.1 GiB (as given)" in lines
    assert "seconds: planned only for what fits" in lines
    (at,) = [i for i, line in enumerate(lines) if line.startswith("does not fit: ")]
    assert lines[at + 1].startswith("  set ")
    code, out, _ = run("plan", "sokoban", "ppo", "qwen2.5-7b", "--gpu", "a10g")
    assert (code, out.splitlines()[-1]) == (
        1,
        "  none of the changes that `moored plan` tries makes it fit; take a smaller model or a "
        "larger GPU",
    )


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
    words = ["plan", "sokoban", "grpo", "qwen2.5-7b", "--gpu", "h100", "--json"]
    code, out, _ = run(*words)
    found = json.loads(out)
    assert code == 1
    assert not found["fits"]
    assert found["num_parameters"] == 7_615_616_512
    assert found["memory_gib"]["update"]["policy weights"] == pytest.approx(14.185, abs=0.001)
    assert found["advice"][-1]["options"]["optimizer.lora_rank"] == 64
    assert found["seconds"] is None
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--turns", "2", "--json")
    found = json.loads(out)
    assert (code, found["fits"], found["advice"]) == (0, True, [])
    assert found["trajectory_tokens"] == 300 + 2 * 400 + 60
    assert found["step_s"] == pytest.approx(sum(found["seconds"].values()), abs=1e-3)


def test_lengths_can_be_given(run):
    words = ["--turns", "3", "--prompt-tokens", "500", "--reply-tokens", "100", "--json"]
    found = json.loads(run("plan", "bandit", "grpo", "model=nano", *words)[1])
    assert (found["prompt_tokens"], found["turns"], found["reply_tokens"]) == (500, 3, 100)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reply-tokens", "1000"], "replies of 1000 tokens are longer than rollout.max_response"),
        (["--turns", "1000"], "an episode of 61,240 tokens (a prompt of 300, then 1000 turns) is "),
        (["--prompt-tokens", "9999"], "tokens (a prompt of 9999, then 1 turn) is longer than roll"),
    ],
)
def test_episodes_that_cannot_be_are_not_planned(run, words, said):
    code, out, err = run("plan", "sokoban", "grpo", "qwen2.5-0.5b", "--gpu", "h100", *words)
    assert (code, out) == (2, "")
    assert said in err and "rollout.max_" in err


def test_advice_is_held_to_the_lengths_that_were_given(run):
    """10 replies of 350 tokens do not go into a context of 2,048, which was advised for them."""
    words = ["plan", "sokoban", "grpo", "qwen2.5-0.5b", "--gpu", "rtx-4090"]
    words += ["engine.dtype=float32", "rollout.max_context=16384", "--json"]
    given = ["--turns", "10", "--reply-tokens", "350"]
    pieces = json.loads(run(*words, *given)[1])["advice"]
    assert len(pieces) == 3
    for piece in pieces:
        changed = [f"{name}={value}" for name, value in piece["options"].items()]
        assert run(*words, *given, *changed)[0] == 0
    # Without --turns an episode has as many as the context has room for.
    short = json.loads(run(*words)[1])["advice"]
    assert {"rollout.max_context": 2048} in [piece["options"] for piece in short]


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
    words = ["--memory-gib", "10", "--tflops", "100", "--bandwidth", "1"]
    code, out, _ = run("plan", "sokoban", "grpo", *words)
    assert code == 0
    assert "GPU: unnamed, 10.0 GiB (as given)" in out
    code, out, _ = run("plan", "sokoban", "grpo", "--gpu", "h200", "--memory-gib", "0.5")
    assert code == 1


def test_the_gpu_here_is_the_default(run, monkeypatch):
    here = ("NVIDIA Odd 1", 24 * 2**30)
    monkeypatch.setattr("moored.engine.gpu.present_gpu", lambda device="auto": here)
    code, out, _ = run("plan", "sokoban", "grpo", "qwen2.5-0.5b")
    assert code == 0
    assert "GPU: NVIDIA Odd 1, 24.0 GiB (the one here)" in out
    assert "seconds: the rates of NVIDIA Odd 1 are not known; name one with --gpu" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h2000"], "GPU 'h2000' is not in the table (did you mean 'h200'?); give its "),
        (["--memory-gib", "48"], "describe a GPU together; give all three, or name one with --gpu"),
        (["--gpu", "h200", "--tflops", "0"], "--tflops must be from 0.1 to 1,000,000, got 0"),
        (["model=org/unknown"], "'org/unknown' is not in the table, and plans download nothing"),
        (["model=nanoo"], "neither embedded nor a folder; did you mean 'nano'?"),
        (["engine.device=cpu"], "engine.device is cpu, and plans are made for GPUs; leave it out"),
        (["engine.device=banana"], "engine.device is banana, and plans are made for GPUs"),
        (["engine.device=cpu:0"], "engine.device is cpu:0, and plans are made for GPUs"),
        (["engine.kind=endpoint"], "engine.kind = endpoint computes elsewhere; plans are made for"),
        (["smok"], "unknown preset 'smok'; did you mean 'smoke'?"),
        (["env=sokobn"], "unknown environment 'sokobn'; did you mean 'sokoban'?"),
    ],
)
def test_a_mistake_is_one_line(run, words, message):
    code, out, error = run("plan", *words)
    assert (code, out) == (2, "")
    assert error.startswith("moored: ")
    assert message in error
    assert error.count("\n") == 1


CLUSTER = ["plan", "sokoban", "grpo", "qwen2.5-7b", "rollout.num_groups=64", "--gpu", "h200"]


def test_a_plan_for_a_cluster_compares_layouts_and_shows_both_kinds_of_gpu(run):
    code, out, _ = run(*CLUSTER, "engine.ray.publish=direct", "--gpus", "64")
    lines = out.splitlines()
    assert code == 0
    assert lines[1] == (
        "cluster: 64 x h200 in 8 nodes, 450 GB/s within a node, 3,200 Gbit/s between nodes"
    )
    names = ["together", "apart, in turn", "apart, max_lag 1"]
    assert [line[:19].strip() for line in lines[5:8]] == names
    assert any(line.startswith("best: apart, max_lag 1; micro-batches of ") for line in lines)
    # 12 bytes of 7.616 billion parameters over 32 learners; 2 bytes of all of them.
    assert "policy                  2.66" in lines
    assert "weights                         14.19" in lines
    assert "no run on several GPUs was measured" in lines[-1]
    assert "with Ray, engine.ray.env_actors puts those that compute much" in lines[-2]
    # The options are those of a configuration.
    (options,) = (line.split()[1:] for line in lines if line.startswith("set "))
    config = load_config({}, [*options, "rollout.num_groups=64"])
    assert (config.engine.ray.learners, config.engine.ray.replicas) == (32, 32)
    assert config.rollout.max_lag == 1
    assert config.engine.ray.publish == "direct"


def test_a_model_that_fits_no_gpu_has_samplers_of_several(run):
    words = ["sokoban", "grpo", "model=meta-llama/Llama-3.1-70B", "rollout.num_groups=64"]
    lines = run("plan", *words, "--gpu", "h200", "--gpus", "64")[1].splitlines()
    (options,) = (line.split()[1:] for line in lines if line.startswith("set "))
    config = load_config({}, [*options, "rollout.num_groups=64"])
    assert config.engine.gpus_per_sampler == 2
    assert isinstance(config.engine.ray.replicas, int)
    assert config.engine.ray.learners + 2 * config.engine.ray.replicas <= 64
    # 141 GB of weights over two GPUs of 140 GiB.
    assert config.engine.vllm.memory_share == 0.9


def test_gpus_that_are_left_over_are_given_their_reason(run):
    many = ["plan", "sokoban", "grpo", "qwen2.5-7b", "--gpu", "h200", "--gpus"]
    out = run(*many, "1000")[1]
    assert "cluster: 1,000 x h200 in 125 nodes" in out
    assert re.search(r"8\d\d GPUs are left over: each of the 128 episodes has a replica", out)
    assert "1 episode at a time on a replica" in out
    words = ["sokoban", "grpo", "model=meta-llama/Llama-3.1-70B", "optimizer.lora_rank=64"]
    out = run("plan", *words, "rollout.num_groups=64", "--gpu", "h200", "--gpus", "8")[1]
    assert "1 GPU is left over: no whole replica fits there" in out


def test_a_small_model_on_a_cluster_has_its_size(run):
    assert "model: nano, 1.2 million parameters\n" in run("plan", "model=nano", "--gpus", "2")[1]


def test_seconds_of_small_models_are_not_planned_and_said_to_be_rough_for_clusters(run):
    small = "not planned below 0.1 billion parameters, because the host bounds steps of such models"
    code, out, _ = run("plan", "model=mini", "--gpu", "h200")
    assert (code, small in out) == (0, True)
    assert f"those of one GPU are {small}" in run("plan", "model=mini", "--gpus", "2")[1]
    assert small not in run("plan", "qwen2.5-0.5b", "--gpus", "2")[1]
    assert json.loads(run("plan", "model=mini", "--gpu", "h200", "--json")[1])["step_s"] is None


def test_float32_has_memory_and_no_seconds(run):
    code, out, _ = run("plan", "model=nano", "engine.dtype=float32", "--gpu", "h200")
    assert code == 0
    assert "seconds: not planned in float32, because the rates of GPUs are those of bfloat16" in out
    assert "fits: " in out


def test_a_server_that_runs_already_takes_no_memory_here(run):
    words = ["plan", "sokoban", "grpo", "qwen2.5-3b", "engine.sampler=vllm", "--gpu", "h200"]
    own = json.loads(run(*words, "--json")[1])["memory_gib"]
    server = ["engine.vllm.server=http://host:8000", "engine.vllm.memory_share=0.01"]
    code, out, _ = run(*words, *server, "--json")
    assert code == 0
    for parts in json.loads(out)["memory_gib"].values():
        assert not {"vLLM", "sampler weights", "keys and values"} & set(parts)
    assert own["rollout"]["vLLM"] > 50


def test_vllm_that_could_not_start_is_refused(run):
    words = ["plan", "model=Qwen/Qwen2.5-14B", "optimizer.lora_rank=64", "engine.sampler=vllm"]
    code, _, error = run(*words, "engine.vllm.memory_share=0.1", "--gpu", "h200")
    assert code == 2
    # 29.5 GB are 27.5 GiB; an episode of 2,048 tokens is 0.4 GiB more.
    assert "gives vLLM 14.0 GiB of h200, but its weights and one episode take 27.9 GiB" in error
    share = re.search(r"set it to (0\.\d+) or more", error)
    assert share is not None
    assert run(*words, f"engine.vllm.memory_share={share[1]}", "--gpu", "h200")[0] == 0
    halves = ["engine.vllm.memory_share=0.11", "engine.vllm.tensor_parallel=2", "--gpu", "h200"]
    assert run(*words, *halves)[0] == 0


def test_json_of_a_cluster_has_every_layout(run):
    found = json.loads(run(*CLUSTER, "--gpus", "16", "--samplers", "8", "--json")[1])
    assert found["fits"] and found["remedy"] is None
    assert found["best"] in found["layouts"]
    for layout in found["layouts"].values():
        assert (layout["learners"], layout["replicas"] * layout["tensor_parallel"]) == (8, 8)
        assert layout["step_s"] > layout["rollout_s"]


def test_a_cluster_that_is_too_small_has_a_remedy_and_exit_code_1(run):
    words = ["plan", "sokoban", "ppo", "model=meta-llama/Llama-3.1-70B", "--gpu", "h100"]
    words += ["rollout.num_groups=64"]
    code, out, _ = run(*words, "--gpus", "8")
    last = out.splitlines()[-1]
    assert (code, last.startswith("does not fit: give it ")) == (1, True)
    num_gpus = last.split()[5]
    assert run(*words, "--gpus", num_gpus)[0] == 0
    assert json.loads(run(*words, "--gpus", "8", "--json")[1])["remedy"] == last[14:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samplers", "4"], "--samplers describes a cluster; give the number of GPUs too"),
        (["--samplers", "0"], "--samplers describes a cluster; give the number of GPUs too"),
        (["--network", "100"], "--network describes a cluster; give the number of GPUs too"),
        (
            ["--gpus", "4", "--samplers", "1", "--tensor-parallel", "2"],
            "--tensor-parallel 2 needs 2 GPUs of one node for a sampler, and --samplers 1",
        ),
        (["--gpus", "8", "--samplers", "8"], "--samplers must leave GPUs to learners: from 1 to 7"),
        (["--gpus", "8", "--tensor-parallel", "3"], "must divide the 4 heads of the model, got 3"),
        (["--gpus", "8", "--nvlink", "-1"], "--nvlink must be from 0.01 to 1,000,000, got -1"),
        (["--gpus", "8", "engine.device=cpu"], "engine.device is cpu, and plans are made for GPUs"),
        (["engine.kind=ray"], "engine.kind = ray runs on several GPUs; say how many: --gpus 8"),
        (["engine.kind=torchrun"], "runs on several GPUs; say how many: --gpus 8"),
        (["--gpus", "8", "engine.kind=endpoint"], "engine.kind = endpoint computes elsewhere"),
    ],
)
def test_a_mistake_about_a_cluster_is_one_line(run, words, message):
    code, out, error = run("plan", *words)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_no_line_is_broken_on_a_narrow_terminal(run, monkeypatch):
    wide = run("plan", "sokoban", "grpo", "qwen2.5-7b")[1]
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("plan", "sokoban", "grpo", "qwen2.5-7b")[1] == wide


def test_a_plan_for_a_named_gpu_does_not_wait_for_torch(tmp_path):
    words = ["plan", "sokoban", "grpo", "--gpu", "h200"]
    done = run_warm(words, code=PROBE, cwd=tmp_path, slim=True)
    assert (done.returncode, done.stderr) == (0, "False\n")


SCALE = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_on_scale_print_what_it_shows(run):
    (commands,) = re.findall(r"```sh\n(moored plan.*?)```", SCALE, re.DOTALL)
    printed = "".join(run(*shlex.split(line)[1:])[1] for line in commands.splitlines())
    (shown,) = re.findall(r"```text\n(cluster: .*?)```", SCALE, re.DOTALL)
    assert set(shown.splitlines()) <= set(printed.splitlines())


@pytest.mark.parametrize("size", ["0.5", "1.5", "3", "7", "14", "32", "70"])
def test_the_table_of_the_page_on_scale_is_what_plans_say(run, size):
    model = "meta-llama/Llama-3.1-70B" if size == "70" else f"Qwen/Qwen2.5-{size}B"
    words = ["sokoban", "grpo", f"model={model}", "rollout.num_groups=64"]
    words += ["rollout.max_context=4096", "--gpu", "h200", "--json"]
    steps = []
    for num_gpus in ("8", "64"):
        layouts = json.loads(run("plan", *words, "--gpus", num_gpus)[1])["layouts"]
        steps += [shown(layouts.get(name)) for name in ("together", "apart, max_lag 1")]
    direct = json.loads(run("plan", *words, "engine.ray.publish=direct", "--gpus", "64")[1])[
        "layouts"
    ]
    steps.append(shown(direct["apart, max_lag 1"]))
    (line,) = re.findall(rf"^\| {re.escape(size)} B \|(.*)\|$", SCALE, re.MULTILINE)
    assert [cell.split(" (")[0].strip() for cell in line.split("|")[:5]] == steps


def shown(layout: dict[str, float] | None) -> str:
    if layout is None:
        return "–"
    return f"{layout['step_s']:.1f} s"


SHORT = ("plan", "sokoban", "grpo", "qwen2.5-1.5b", "--turns", "1", "--prompt-tokens", "100")
FULL = ("engine.micro_batch_tokens=24576", "engine.gradient_checkpointing=false")


def test_a_plan_says_where_train_would_refuse_what_fits_for_the_lengths_given(run):
    words = (*SHORT, *FULL, "--reply-tokens", "60", "--gpu", "rtx-5090")
    code, out, _ = run(*words)
    assert code == 0 and "fits: 30.9 GiB" in out
    assert "but `moored train` refuses it: it does not know these lengths, and assumes full" in out
    record = json.loads(run(*words, "--json")[1])
    with pytest.raises(MooredError) as refused:
        refuse_what_cannot_fit(*trained(FULL, "rtx-5090"))
    assert f"does not fit: {record['gib_refused_by_train']:.1f} GiB" in str(refused.value)
    # Where the size of micro-batches is left to it, a run begins.
    words = (*SHORT, "--reply-tokens", "60", "--gpu", "a100-40", "--json")
    assert json.loads(run(*words)[1])["gib_refused_by_train"] is None


def test_no_advice_is_given_that_train_would_refuse(run):
    words = ("engine.micro_batch_tokens=16384", "engine.gradient_checkpointing=false")
    code, out, _ = run(
        *SHORT[:4], *words, "--turns", "2", "--reply-tokens", "100", "--gpu", "a100-40"
    )
    advised = re.findall(r"^  set (\S+(?: \S+=\S+)*) \(", out, re.MULTILINE)
    assert code == 1 and advised
    for options in advised:
        assert refuse_what_cannot_fit(*trained((*words, *options.split()), "a100-40")) is None


def trained(words: tuple[str, ...], gpu: str) -> tuple[Config, Gpu]:
    return load_config(read_presets(["sokoban", "grpo", "qwen2.5-1.5b"]), words), GPUS[gpu]


def test_rollouts_of_the_plain_sampler_are_left_out_of_seconds(run):
    words = ("plan", "sokoban", "grpo", "qwen2.5-1.5b", "engine.sampler=plain")
    _, out, _ = run(*words)
    lines = out.splitlines()
    assert "nor rollouts: the plain sampler writes at the speed of the model's own code" in lines
    assert not any(line.startswith(("decode", "step")) for line in lines)
    record = json.loads(run(*words, "--json")[1])
    assert record["step_s"] is None and "decode" not in record["seconds"]
    cluster = run(*words, "--gpus", "2")[1]
    assert "rollouts are planned as those of vLLM; the plain sampler, which writes at" in cluster
