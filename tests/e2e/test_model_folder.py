"""The model a run leaves behind, and evaluating runs and models with the right weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from moored.engine.build import build, evaluate_source
from moored.engine.local.learner import LocalLearner
from moored.envs.mix import EnvMix
from moored.errors import MooredError
from moored.evaluate import Evaluation
from moored.runlog.log import read_records
from moored.train import start, train
from moored.types import Prompt
from tests.e2e.toys import HERE, success_rates, toy_config

PROMPT, REPLIES = Prompt(np.array([2, 4, 1, 3])), [np.array([4, 1]), np.array([5, 7])]


def evaluated(source: Path, mix: EnvMix | None = None) -> Evaluation:
    return evaluate_source(
        str(source),
        mix,
        num_tasks=64,
        num_samples=1,
        temperature=0.5,
        max_tokens=2,
        split="validation",
        seed=0,
    )


def logprobs(folder: Path) -> list[np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return LocalLearner(model).score(PROMPT, REPLIES)


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_run_and_model_folder_are_evaluated_with_the_trained_weights(
    lora_rank, toy_folder, tmp_path
):
    torch.set_num_threads(1)
    config = toy_config(
        toy_folder,
        "algorithm.name=grpo",
        f"optimizer.lora_rank={lora_rank}",
        "num_steps=20",
        "rollout.group_size=8",
        "evaluation.every=20",
        "evaluation.num_tasks=64",
    )
    run = build(config, tmp_path / "run")
    success_rates(run)
    of_run = evaluated(tmp_path / "run")
    mix = EnvMix.parse(f"{HERE}:Echo")
    of_model = evaluated(tmp_path / "run" / "model", mix)
    logged = read_records(tmp_path / "run")[-1]["evaluation/success_rate"]
    assert of_run.success_rate == of_model.success_rate == logged
    assert of_run.success_rate > evaluated(toy_folder, mix).success_rate + 0.1
    expected = run.learner.score(PROMPT, REPLIES)
    for mine, own in zip(logprobs(tmp_path / "run" / "model"), expected, strict=True):
        np.testing.assert_allclose(mine, own, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    chat = [{"role": "user", "content": "A"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user A end assistant "
    assert not list((tmp_path / "run" / "model").glob("adapter*"))


def test_a_run_stopped_on_request_leaves_a_model_that_another_run_can_start_from(
    toy_folder, tmp_path
):
    start(first := build(toy_config(toy_folder), tmp_path / "first"))
    train(first, lambda record: True)
    again = toy_config(tmp_path / "first" / "model", "num_steps=1", "optimizer.lr=1e-9")
    second = build(again, tmp_path / "second")
    for (name, a), (_, b) in zip(first.learner.weights(), second.learner.weights(), strict=True):
        assert torch.equal(a, b), name


def test_weights_of_another_model_are_refused(toy_folder, tmp_path):
    start(run := build(toy_config(toy_folder, "num_steps=1"), tmp_path))
    train(run)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("lora_rank: 0", "lora_rank: 4"))
    with pytest.raises(MooredError, match="does not fit the model"):
        evaluated(tmp_path)
