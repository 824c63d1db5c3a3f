"""The model a run leaves behind, and evaluating runs and models with the right weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from moored.cli.eval import evaluate_source
from moored.engine.build import build_engine
from moored.engine.checkpoint import newest_checkpoint
from moored.engine.local.learner import LocalLearner
from moored.errors import MooredError
from moored.evaluate import Evaluation
from moored.models.find import model_folder
from moored.runlog.log import read_records
from moored.train import build_run, start, train
from moored.types import Prompt, ScoreRequest
from tests.e2e.toys import HERE, success_rates, toy_config, weights_of
from tests.tiny_model import tiny_model

REQUEST = ScoreRequest(Prompt(np.array([2, 4, 1, 3])), [np.array([4, 1]), np.array([5, 7])])
ECHO = f"{HERE}:Echo"


def evaluated(source: Path, env: str | None = None) -> Evaluation:
    given = {
        "evaluation": {"num_tasks": 64, "num_samples": 1, "temperature": 0.5},
        "rollout": {"max_response_tokens": 2},
        "seed": 0,
    }
    return evaluate_source(str(source), env, given)


def test_a_model_that_the_engine_computes_otherwise_is_not_evaluated(toy_folder, tmp_path):
    """Cohere scales its logits, which the sampler does not: replies would be another model's."""
    shutil.copytree(toy_folder, tmp_path / "cohere")
    tiny_model("cohere", vocab_size=9, logit_scale=0.25).save_pretrained(tmp_path / "cohere")
    with pytest.raises(MooredError, match=r"'cohere' .* differ from the model's by"):
        evaluated(tmp_path / "cohere", ECHO)


def test_a_run_that_goes_on_is_evaluated_by_the_checkpoint_it_has_by_then(
    toy_folder, tmp_path, monkeypatch
):
    run = build_run(toy_config(toy_folder, "num_steps=1"), tmp_path / "run")
    success_rates(run)
    saved = newest_checkpoint(tmp_path / "run")

    def build(*args: Any, **options: Any) -> Any:
        saved.rename(saved.with_name("step_000009"))
        return build_engine(*args, **options)

    monkeypatch.setattr("moored.engine.build.build_engine", build)
    assert evaluated(tmp_path / "run").num_tasks == 64


def logprobs(folder: Path) -> list[np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return LocalLearner(model).score([REQUEST])[0]


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
    run = build_run(config, tmp_path / "run")
    success_rates(run)
    of_run = evaluated(tmp_path / "run")
    of_model = evaluated(tmp_path / "run" / "model", ECHO)
    logged = read_records(tmp_path / "run")[-1]["evaluation/success_rate"]
    assert of_run.success_rate == of_model.success_rate == logged
    assert of_run.success_rate > evaluated(toy_folder, ECHO).success_rate + 0.1
    expected = run.engine.learner.score([REQUEST])[0]
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
    start(first := build_run(toy_config(toy_folder), tmp_path / "first"))
    train(first, lambda record: True)
    again = toy_config(tmp_path / "first" / "model", "num_steps=1", "optimizer.lr=1e-9")
    second = build_run(again, tmp_path / "second")
    theirs = weights_of(second)
    for name, tensor in weights_of(first).items():
        assert torch.equal(tensor, theirs[name]), name


def test_weights_of_another_model_are_refused(toy_folder, tmp_path):
    start(run := build_run(toy_config(toy_folder, "num_steps=1"), tmp_path))
    train(run)
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("lora_rank: 0", "lora_rank: 4"))
    with pytest.raises(MooredError, match="does not fit the model"):
        evaluated(tmp_path)


def test_replies_end_where_the_generation_config_of_a_model_says(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder("nano"), folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    for named, ends in ((2, (2,)), ([2, 1], (2, 1)), (None, (2,))):
        settings["eos_token_id"] = named
        (folder / "generation_config.json").write_text(json.dumps(settings))
        engine = build_engine(toy_config(folder), trains=False)
        assert engine.renderer.stop_ids == ends
