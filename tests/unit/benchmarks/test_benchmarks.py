"""The speed comparisons compare like with like."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.warm import run_script, run_warm

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
TINY_STEP = "--device cpu --groups 2 --group-size 2 --reply-tokens 4 --repeats 1"


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of `benchmarks/` by name, as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_both_samplers_write_equally_many_forced_tokens(benchmark, tmp_path):
    out = tmp_path / "rollout.json"
    words = "--device cpu --groups 2 --group-size 2 --turns 2 --reply-tokens 5 --repeats 1"
    benchmark("rollout").main([*words.split(), "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]["forced"]
    # 2 tasks x 2 episodes x 2 turns x 5 tokens
    assert figures["moored"]["tokens"] == figures["plain generate"]["tokens"] == [40]


def test_parts_of_the_hosts_time_add_up_to_everything(benchmark, tmp_path):
    out = tmp_path / "host.json"
    words = "--model nano --groups 2 --group-size 2 --turns 2 --repeats 1"
    benchmark("host").main([*words.split(), "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    everything = figures.pop("everything")
    assert sum(figures.values()) == pytest.approx(everything)
    assert {"renderer: decode", "renderer: extend", "environment: step"} < figures.keys()


def test_the_driver_plays_every_episode_and_its_phases_add_up_to_the_step(
    benchmark, monkeypatch, tmp_path
):
    out = tmp_path / "driver.json"
    driver = benchmark("driver")
    monkeypatch.setattr(driver, "bind_to_one_core", lambda: None)  # it would bind other tests too
    words = "--env bandit --groups 2 --group-size 3 --repeats 1 --per-poll 2 --set model=nano"
    driver.main([*words.split(), "--out", str(out)])
    (found,) = json.loads(out.read_text())["figures"].values()
    # 2 tasks x 3 episodes of one turn
    assert found["wall"]["turns"] == found["processor"]["turns"] == 6
    for figures in found.values():
        phases = {name for name in figures if name.endswith("_s")} - {"turns_per_s", "step_s"}
        assert {"rollout_s", "filter_s", "advantages_s", "update_s", "publish_s"} < phases
        assert sum(figures[phase] for phase in phases) == pytest.approx(figures["step_s"])


def test_replies_of_the_instant_stream_come_in_portions(benchmark):
    from moored.engine.base import Request
    from moored.types import Prompt

    stream = benchmark("instant").InstantStream(["a", "b"], per_poll=2)
    for session, seed in enumerate((0, 1, 3)):
        stream.submit(Request(session=session, prompt=Prompt(np.ones(1)), seed=seed))
    assert stream.poll() == [(0, "a"), (1, "b")]
    assert stream.poll() == [(2, "b")]
    assert stream.poll() == []


def test_an_endless_game_goes_on_after_it_was_solved(benchmark):
    env = benchmark("rollout").EndlessSokoban(max_turns=9)
    env.reset(3)
    results = []
    for _ in range(9):
        results.append(env.step(f"<think>.</think><answer>{env.oracle()}</answer>"))
        if results[-1].success:
            break
    assert results[-1].success
    assert not env.step("nonsense").is_over


def test_plain_generate_and_moored_write_the_same_likeliest_tokens(benchmark):
    from transformers import LlamaForCausalLM

    from moored.engine.base import Request, SamplingParams, write_replies
    from moored.types import Prompt

    model = LlamaForCausalLM(benchmark("sampler").SHAPES["toy"])
    lengths = (3, 7, 5)
    rng = np.random.default_rng(0)
    requests = [
        Request(session=i, prompt=Prompt(rng.integers(1, 64, n)), seed=i)
        for i, n in enumerate(lengths)
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    harness = benchmark("harness")
    plain = harness.PlainSampler(harness.plain_model(model, bf16=False))
    moored = harness.make_sampler(model, bf16=False, max_context=32)
    replies = [write_replies(sampler, requests, params) for sampler in (moored, plain)]
    for ours, theirs in zip(*replies, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_a_plain_reply_ends_with_its_stop_token(benchmark):
    completion = benchmark("harness")._completion(np.array([5, 9, 2, 0, 0]), (2,))
    assert completion.token_ids.tolist() == [5, 9, 2]
    assert completion.finish_reason.value == "stop"


def test_decoding_time_leaves_out_the_prefill(benchmark):
    sampler, timing = benchmark("sampler"), benchmark("harness").Timing
    whole, first = timing(seconds=[2.0], tokens=[8]), timing(seconds=[0.5], tokens=[2])
    case = sampler.Case("toy", 2, "moored", 4, whole, first, None)
    assert case.decode_ms == 500.0  # 1.5 s for the 3 tokens after the first


def test_every_sampler_writes_all_tokens_of_every_row(benchmark, tmp_path):
    out = tmp_path / "sampler.json"
    words = "--device cpu --shape toy --rows 3 --prompt-tokens 4 --new-tokens 5 --repeats 1"
    benchmark("sampler").main([*words.split(), "--out", str(out)])
    cases = json.loads(out.read_text())["figures"]
    assert [case["sampler"] for case in cases] == ["generate", "generate, static cache", "moored"]
    assert all(case["whole"]["tokens"] == [15] for case in cases)


def test_a_training_step_without_trl_is_timed_alone(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    out = tmp_path / "step.json"
    benchmark("train_step").main([*TINY_STEP.split(), "--out", str(out)])
    (pair,) = json.loads(out.read_text())["figures"]["pairs"]
    assert pair["trl"] is None
    assert pair["moored"]["tokens"] == [16]
    assert "pip install 'moored[trl]'" in capsys.readouterr().out


def test_both_ways_of_cross_scoring_agree(benchmark, tmp_path):
    out = tmp_path / "score.json"
    words = "--device cpu --model toy --prompts 3 --reasonings 4 --prompt-tokens 20"
    benchmark("score").main([*words.split(), "--reasoning-tokens", "9", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    assert figures["difference"] < 1e-4
    assert figures["moored"]["tokens"] == figures["concatenated"]["tokens"]


def test_fast_and_plain_learners_agree_on_what_the_sampler_wrote(benchmark, tmp_path):
    out = tmp_path / "agreement.json"
    words = "smoke engine.device=cpu rollout.num_groups=2 rollout.group_size=2"
    benchmark("agreement").main([*words.split(), "--rounds", "2", "--out", str(out)])
    rounds = json.loads(out.read_text())["figures"]["rounds"]
    assert len(rounds) == 2
    for found in rounds:
        assert found["exact_gradient_norm"] > 0.0
        assert found["sampler, as it wrote"]["logp_max"] < 1e-4
        # In float32 the model's own code is what counts as exact.
        assert "the model's own code" not in found
        assert 0.0 < found["moored's learner"]["gradient"] < 1e-4


def test_how_far_a_gradient_is_off(benchmark):
    torch = pytest.importorskip("torch")
    own = {"logp": np.array([-1.0, -2.5]), "gradients": [torch.tensor([6.0]), torch.tensor([4.0])]}
    exact = {
        "logp": np.array([-1.0, -2.0]),
        "gradients": [torch.tensor([3.0]), torch.tensor([4.0])],
    }
    found = benchmark("agreement").difference(own, exact)
    assert (found["logp_mean"], found["logp_max"]) == (0.25, 0.5)
    # 3 off where the exact gradient has length 5; the first weight is off by all of its own.
    assert found["gradient"] == pytest.approx(0.6)
    assert found["gradient_worst_weight"] == 1.0
    assert found["cosine"] == pytest.approx((18 + 16) / (5 * 52**0.5))


def test_the_gradient_benchmark_keeps_every_measurement_with_its_command(
    benchmark, tmp_path, monkeypatch
):
    script, out = benchmark("gradients"), tmp_path / "gradients.json"
    script.arms = lambda _: {"start": ["smoke", "rollout.max_response_tokens=8"]}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-c", script.ENTRY]
        return run_warm(command[3:])

    # The command is forked with torch imported.
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    script.main(f"--groups 3 --group-size 2 --buckets 3 --params last-block --out {out}".split())
    record = json.loads(out.read_text())
    assert "benchmarks/" in record["command"] and record["cores"]
    found = record["figures"]["start"]
    assert found["num_groups"] == 3 and len(found["buckets"]) == 3 and found["seconds"] > 0


def test_planned_and_measured_seconds_stand_side_by_side(benchmark, tmp_path):
    out = tmp_path / "plan.json"
    words = "--device cpu --size tiny --algorithm grpo ppo --groups 2 --group-size 2 --turns 2"
    words += " --prompt-tokens 6 --reply-tokens 3 --observation-tokens 2 --warm-up 0 --repeats 1"
    benchmark("plan").main([*words.split(), "--out", str(out)])
    grpo, ppo = json.loads(out.read_text())["figures"]
    assert (grpo["algorithm"], ppo["algorithm"]) == ("grpo", "ppo")
    # 6 + 2 x 3 + 2
    assert ppo["plan"]["trajectory_tokens"] == 14
    assert ppo["plan"]["memory_gib"]["update"].keys() > {"critic weights", "gradients"}
    for phase in ("rollout", "scoring", "update", "publish"):
        assert ppo["phases"][phase]["measured_s"] > 0.0
        assert ppo["phases"][phase]["measured_gib"] is None
        # A processor computes in float32, whose seconds are not planned.
        assert ppo["phases"][phase]["planned_s"] is None
    assert ppo["phases"]["update"]["planned_gib"] > grpo["phases"]["update"]["planned_gib"]


def test_a_random_model_is_a_folder_that_loads(benchmark, tmp_path):
    import torch

    from moored.models.load import load_model

    assert benchmark("random_model").main(["toy", str(tmp_path / "toy")]) == 0
    loaded = load_model(str(tmp_path / "toy"), torch.device("cpu"), exact=False)
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    assert loaded.model.config.eos_token_id == loaded.tokenizer.eos_token_id


def test_replies_of_a_random_model_end_after_so_many_tokens_on_average(benchmark, tmp_path):
    import torch

    from moored.models.load import load_model

    benchmark("random_model").write_model("toy", tmp_path, torch.float32, 20.0)
    model = load_model(str(tmp_path), torch.device("cpu")).model
    with torch.no_grad():
        ids = torch.arange(40)[None] % model.config.vocab_size
        chances = model(input_ids=ids).logits.softmax(dim=-1)[..., model.config.eos_token_id]
    assert 1 / chances.mean().item() == pytest.approx(20.0, rel=0.05)


def test_a_reply_of_a_deep_random_model_may_end_at_any_token_alike(
    benchmark, monkeypatch, tmp_path
):
    import torch
    from transformers import LlamaConfig

    from moored.models.load import load_model

    script = benchmark("random_model")
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    deep = LlamaConfig(vocab_size=512, initializer_range=0.2, **sizes, **heads)
    monkeypatch.setitem(script.SHAPES, "deep", deep)
    script.write_model("deep", tmp_path, torch.float32, 20.0)
    model = load_model(str(tmp_path), torch.device("cpu")).model
    with torch.no_grad():
        ids = torch.arange(300)[None] + 100
        chances = model(input_ids=ids).logits.softmax(dim=-1)[0, :, model.config.eos_token_id]
    parts = torch.stack([1 / part.mean() for part in chances.split(100)])
    assert parts.min() > 12 and parts.max() < 33


def test_steps_of_a_warm_start_are_timed_behind_the_first(benchmark, tmp_path):
    words = ["model=nano", "env=bandit", "num_steps=4", "batch_tokens=256", "--warm-up", "2"]
    assert benchmark("sft_step").main([*words, "workers=0", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out").read_text())["figures"]
    phases = found["phases_s"]
    assert 0.0 < phases["dialogues_s"] < phases["step_s"]
    assert phases["update_s"] < phases["step_s"]
    # Two steps are left, so that their median is their mean.
    assert 100 < found["tokens_per_s"] * phases["step_s"] <= 256


def test_sampling_goes_through_all_turns_and_counts_new_tokens(benchmark):
    script = benchmark("vllm_sampling")
    words = ["--shape", "toy", "--engine", "moored", "--rows", "3", "--device", "cpu"]
    sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"]
    found = script.run_side(script.parse_arguments([*words, *sizes, "--lengths", "equal", "turns"]))
    assert found["equal 3"]["tokens"] == [3 * 4]
    assert found["turns 3"]["tokens"][0] >= 3 * script.TURNS


class Scripted:
    """A side whose replies are as long as asked, or 2 tokens."""

    def __init__(self) -> None:
        self.waiting, self.forgotten = [], []

    def begin(self, most, stop):
        pass

    def submit(self, row, ids, seed, length):
        self.waiting.append((row, np.zeros(length or 2, dtype=np.int64)))

    def poll(self):
        waiting, self.waiting = self.waiting, []
        return waiting

    def forget(self, row):
        self.forgotten.append(row)

    def end(self):
        assert not self.waiting


def test_one_side_writes_the_lengths_of_the_other(benchmark):
    script = benchmark("vllm_sampling")
    options = script.parse_arguments(["--shape", "toy", "--prompt-tokens", "8"])
    side = Scripted()
    first = script.write(side, "turns", 3, 1, options, 0)
    assert set(first.values()) == {2} and len(first) == 3 * script.TURNS
    assert sorted(side.forgotten) == [0, 1, 2]
    wanted = {name: 1 + number % 7 for number, name in enumerate(first)}
    assert script.write(Scripted(), "turns", 3, 1, options, 0, wanted) == wanted


def test_reading_prompts_is_timed_with_and_without_the_outputs_of_all_tokens(benchmark, tmp_path):
    out = tmp_path / "prompts.json"
    words = "--device cpu --shape toy --prompts 3 --tokens 8 --before 4 --repeats 2 --profile"
    assert benchmark("prompts").main([*words.split(), "--out", str(out)]) == 0
    found = json.loads(out.read_text())["figures"]["toy"]
    assert found.keys() == {"present_ms", "all_outputs_ms"} and min(found.values()) > 0.0


def test_a_decoding_step_is_timed_beside_its_bound(benchmark, tmp_path):
    out = tmp_path / "decode.json"
    decode = benchmark("decode")
    words = (
        "--device cpu --shape toy --rows 3 --cells 10 --repeats 2 --bandwidth 1e-6 --tflops 1e-6"
    )
    decode.main([*words.split(), "--out", str(out)])
    (found,) = json.loads(out.read_text())["figures"].values()
    assert 0 < found["min_ms"] <= found["median_ms"] <= found["max_ms"]
    # At a megabyte and a million operations a second: 2 operations a weight and row take longer
    # than its 2 bytes; then 2 x 2 bytes of 10 cells for each layer, row and number of a KV head.
    config = benchmark("sizes").SHAPES["toy"]
    model = benchmark("sizes").make_model("toy", benchmark("torch").device("meta"), bf16=True)
    weights = sum(weight.numel() for weight in model.parameters())
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cached = 4 * 10 * 3 * config.num_hidden_layers * width
    assert found["bound_ms"] == pytest.approx((2 * 3 * weights + cached) / 1e3)


@pytest.mark.parametrize("rows", [16, 128])
def test_tiles_that_are_compared_fit_into_shared_memory(benchmark, rows):
    tiles = benchmark("tiles")
    config = benchmark("sizes").SHAPES["3b"]
    for kind, (lines, columns) in tiles.sizes_of(config).items():
        found = list(tiles.products(kind, lines, columns, rows, 2))
        early = [tile for tile in found if tile is not None and tile.is_early]
        assert None in found and len(set(early)) == len(early) > 3
        matrices = 2 if kind == "gate_up" else 1
        # An H200 has 227 KiB for a program.
        for tile in early:
            size = tile.stages * tile.columns * (tile.rows + matrices * tile.lines) * 2
            assert size <= 227 * 1024 and tile.rows == rows
        parts = {"qkv": {1, 2}, "gate_up": {1}}.get(kind, {1, 2, 3, 4, 6, 8})
        assert {tile.parts for tile in early} == parts
    for tile in tiles.attentions(rows, config):
        assert tile.stages * tile.cells * 128 * 4 <= 227 * 1024
        assert tile.splits == 1 or tile.splits * 2 * rows <= 264


def test_a_mistyped_model_is_one_sentence(tmp_path):
    done = run_script(ROOT / "benchmarks" / "worth.py", "nanoo", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("worth.py: model 'nanoo' is neither embedded nor a folder; did")
    assert done.stderr.count("\n") == 1


def test_facts_are_compared_with_the_room_that_was_shown(benchmark):
    script = benchmark("stated_facts")
    room = "######\nPlayer: (4, 1)\nBoxes: (2, 2)\nTargets: (3, 1)\nActions left: 10."
    right = "<think>I am at (4, 1), box at (2, 2), target at (3, 1). Push Down 1.</think>"
    wrong, none = right.replace("(2, 2)", "(2, 3)"), "<think>I will think twice.</think>"
    judged = [
        script.judge(room, reply, succeeds=succeeds)
        for reply, succeeds in ((right, True), (right, False), (wrong, False), (none, False))
    ]
    assert [(reply.has_facts, reply.is_right) for reply in judged] == [
        (True, True),
        (True, True),
        (True, False),
        (False, False),
    ]
    found = script.summarize(judged)
    assert found["replies with right facts"] == [0.5]
    assert found["success of these, right facts"][0] == 0.5
    assert found["success of these, no facts"][0] == 0.0
