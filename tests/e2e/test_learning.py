"""Every algorithm solves a toy, and a killed run continues as if nothing had happened."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from moored.algorithms import ALGORITHMS, overlong_penalty
from moored.build import build
from moored.config import Config, load_config
from moored.engine.local_learner import LocalLearner
from moored.envs.base import StepResult
from moored.errors import MooredError
from moored.losses import LossOptions
from moored.runlog import read_records
from moored.train import Run, resume, start, train
from moored.types import Message

HERE = "tests.e2e.test_learning"


class Echo:
    """Two states, two letters: answer with the letter that is shown. Tags are not asked for."""

    name: ClassVar[str] = "echo"
    is_stochastic: ClassVar[bool] = False
    max_turns: int = 1

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._letter = "AB"[random.Random(task_seed).randrange(2)]
        return [Message("user", self._letter)]

    def step(self, reply: str) -> StepResult:
        is_right = reply.startswith(self._letter)
        return StepResult(observation="", reward=float(is_right), done=True, success=is_right)

    def oracle(self) -> str:
        return self._letter

    def close(self) -> None:
        pass


CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """A tiny random model over nine words, saved in Hugging Face format."""
    folder = tmp_path_factory.mktemp("toy")
    words = ["pad", "end", "user", "assistant", "A", "B", "C", "D", "E"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="pad"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="end", pad_token="pad", chat_template=CHAT
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_config(folder: Path, *overrides: str) -> Config:
    return load_config(
        {"env": f"{HERE}:Echo", "model": str(folder)},
        [
            "num_steps=40",
            "optimizer.lr=3e-3",
            "optimizer.critic_lr=1e-2",
            "optimizer.num_minibatches=2",
            "rollout.max_response_tokens=2",
            "collapse.every=0",
            "stop.low_variance=0",
            "filter.max_empty_steps=1000",
            "algorithm.entropy_coef=0",
            *overrides,
        ],
    )


def success_rates(run: Run) -> list[float]:
    rates: list[float] = []
    start(run)
    train(run, lambda record: rates.append(record.metrics["rollout/success_rate"]))
    return rates


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_solves_the_toy(name, toy_folder, tmp_path):
    torch.set_num_threads(1)
    rates = success_rates(build(toy_config(toy_folder, f"algorithm.name={name}"), tmp_path / "run"))
    assert np.mean(rates[:2]) < 0.2
    assert np.mean(rates[-5:]) > 0.9


@pytest.mark.parametrize("action", ["drop", "mask", "refill", "soft"])
def test_every_filter_action_trains(action, toy_folder, tmp_path):
    torch.set_num_threads(1)
    config = toy_config(toy_folder, "algorithm.name=grpo", f"filter.action={action}")
    assert np.mean(success_rates(build(config, tmp_path / "run"))[-5:]) > 0.9


def test_masking_and_dropping_make_the_same_update(toy_folder, tmp_path):
    torch.set_num_threads(1)
    weights = []
    for action in ("drop", "mask"):
        config = toy_config(
            toy_folder,
            "algorithm.name=grpo",
            f"filter.action={action}",
            "num_steps=3",
            "optimizer.num_minibatches=1",
        )
        run = build(config, tmp_path / action)
        success_rates(run)
        weights.append(dict(run.learner.weights()))
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(tensor.numpy(), weights[1][name].numpy(), atol=1e-5)


def test_a_resumed_run_writes_the_same_files_as_one_that_never_stopped(toy_folder, tmp_path):
    torch.set_num_threads(1)
    options = ["algorithm.name=ppo", "num_steps=9", "checkpoint_every=3", "evaluation.every=4"]
    options += ["evaluation.num_tasks=8", "algorithm.kl_coef=0.01"]
    config = toy_config(toy_folder, *options)
    whole = build(config, tmp_path / "whole")
    success_rates(whole)
    for killed_at in (2, 3, 5, 7, 8):
        folder = tmp_path / f"killed_{killed_at}"
        first = build(config, folder)
        start(first)
        with pytest.raises(KeyboardInterrupt):
            train(first, _interrupt_at(killed_at))
        # What a kill can leave behind: a torn line and a half-written checkpoint.
        with (folder / "metrics.jsonl").open("a") as log:
            log.write('{"schema": 1, "st')
        (folder / "checkpoints" / ".writing_000099").mkdir(parents=True)
        second = build(config, folder, resume=True)
        resume(second)
        train(second)
        assert (folder / "metrics.jsonl").read_bytes() == (
            tmp_path / "whole" / "metrics.jsonl"
        ).read_bytes()
        for (name, a), (_, b) in zip(
            whole.learner.weights(), second.learner.weights(), strict=True
        ):
            assert torch.equal(a, b), name


def _interrupt_at(step: int):
    def stop(record) -> None:
        if record.step == step:
            raise KeyboardInterrupt

    return stop


def test_a_run_without_any_variance_stops_and_says_why(toy_folder, tmp_path):
    config = toy_config(
        toy_folder, "filter.max_empty_steps=3", "filter.eps=1", "filter.rule=nonzero"
    )
    run = build(config, tmp_path / "run")
    start(run)
    assert "3 steps in a row had no group" in train(run)
    records = read_records(tmp_path / "run")
    assert [r["update/is_empty"] for r in records] == [1.0, 1.0, 1.0]


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(toy_folder, tmp_path):
    config = toy_config(toy_folder, "algorithm.name=grpo", "filter.rule=none")
    run = build(config, tmp_path / "run")
    start(run)
    assert isinstance(run.learner, LocalLearner)
    run.learner.loss = LossOptions(entropy_coef=float("nan"))
    before = {name: tensor.clone() for name, tensor in run.learner.weights()}
    with pytest.raises(MooredError, match=r"step 1: grad_norm is not finite"):
        train(run)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.learner.weights())
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "not finite" in json.loads(last)["error"]


def test_a_model_that_is_not_finite_is_noticed_when_it_writes(toy_folder, tmp_path):
    run = build(toy_config(toy_folder), tmp_path / "run")
    with torch.no_grad():
        for _, tensor in run.learner.weights():
            tensor.fill_(float("nan"))
    with pytest.raises(MooredError, match="not finite"):
        train(run)


def test_overlong_replies_lose_up_to_one():
    assert [overlong_penalty(n, 100, 20) for n in (50, 80, 90, 100, 120)] == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(100, 100, 0) == 0


def test_lora_trains_adapters_only(toy_folder, tmp_path):
    torch.set_num_threads(1)
    config = toy_config(
        toy_folder,
        "algorithm.name=grpo",
        "optimizer.lora_rank=4",
        "num_steps=2",
        "filter.rule=none",
    )
    run = build(config, tmp_path / "run")
    before = {k: v.clone() for k, v in run.learner.weights()}
    success_rates(run)
    changed = {k for k, v in run.learner.weights() if not torch.equal(v, before[k])}
    assert changed and all("lora" in name for name in changed)
