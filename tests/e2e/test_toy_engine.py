"""An engine of the user's own, by `module:attribute`, through the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm import run_warm

TOY = '''
"""Everything a user adds lives in this one file: no model, no tokenizer, no torch."""
import json

import numpy as np

from moored.engine.base import LockstepStream
from moored.engine.endpoint.sampler import TextRenderer
from moored.types import Completion, FinishReason

REPLIES = ["<think>I go up.</think><answer>Up</answer>", "I do not know."]


class ToySampler:
    def __init__(self):
        self.version = 0

    def stream(self, params):
        return LockstepStream(self, params)

    def generate(self, requests, params):
        return [self._write(REPLIES[request.seed % 2]) for request in requests]

    def _write(self, text):
        ids = np.array([ord(char) for char in text])
        return Completion(ids, np.full(len(ids), -1.0), FinishReason.STOP, self.version)

    def end_sessions(self, sessions):
        pass


class ToyLearner:
    version = 0

    def score(self, requests):
        return [[np.full(len(ids), -2.0) for ids in r.continuations] for r in requests]

    def values(self, samples):
        raise NotImplementedError("no critic")

    def damaged_weights(self):
        return []

    def step(self, minibatches, *, lr_factor=1.0):
        for samples in minibatches:
            self.version += 1
            yield {"policy_loss": float(len(samples))}

    def save(self, folder):
        (folder / "toy.json").write_text(json.dumps(self.version))

    def load(self, folder, *, policy_only=False):
        self.version = json.loads((folder / "toy.json").read_text())


class ToyEngine:
    def __init__(self, config, *, trains):
        self.sampler, self.learner, self.renderer = ToySampler(), ToyLearner(), TextRenderer()
        self.scorer = self.learner
        self._note("trains" if trains else "evaluates", config.model)

    def describe(self):
        return "a toy"

    def check(self):
        self._note("check")

    def publish(self):
        self.sampler.version = self.learner.version
        self._note("publish", self.learner.version)

    def export(self, folder):
        self._note("export")

    def close(self):
        self._note("close")

    def _note(self, *what):
        with open("calls.txt", "a") as calls:
            print(*what, file=calls)
'''

OPTIONS = ["engine.kind=toy_engine:ToyEngine", "algorithm.name=grpo", "filter.rule=none"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "toy_engine.py").write_text(TOY)
    return tmp_path


def moored(here: Path, *words: str) -> str:
    """Runs the command in the folder of the user's module; returns what it printed."""
    done = run_warm(words, cwd=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(here: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (here / "run" / f"{name}.jsonl").read_text().splitlines()]


def test_a_toy_engine_trains_resumes_and_is_evaluated_without_an_edit_of_the_package(here):
    moored(here, "train", "smoke", *OPTIONS, "num_steps=2", "--run", "run")
    calls = (here / "calls.txt").read_text().splitlines()
    assert calls == ["trains nano", "check", "publish 1", "publish 2", "export", "close"]
    metrics = records(here, "metrics")
    # 2 groups of 4 episodes, in one minibatch.
    assert [record["learner/policy_loss"] for record in metrics] == [8.0, 8.0]
    assert not any(name.startswith("mismatch/") for name in metrics[0])
    # Every reasoning is as likely under any prompt.
    looks = records(here, "collapse")
    assert looks[0]["collapse_first_turn_sample/mi_estimate"] == pytest.approx(0.0)
    moored(here, "train", "--resume", "run", "num_steps=3")
    assert len(records(here, "metrics")) == 3
    found = json.loads(moored(here, "eval", "run", "-n", "4", "--json"))
    assert found["num_tasks"] == 4 and found["success_rate"] == 0.0
    calls = (here / "calls.txt").read_text().splitlines()[6:]
    assert calls[:6] == ["trains nano", "check", "publish 2", "publish 3", "export", "close"]
    assert calls[6:] == ["evaluates nano", "check", "publish 3", "close"]


def test_log_probs_of_a_toy_learner_can_be_the_old_ones(here):
    options = ["algorithm.old_logprobs=learner", "num_steps=1"]
    moored(here, "train", "smoke", *OPTIONS, *options, "--run", "run")
    (metrics,) = records(here, "metrics")
    # -2 after -1 for every token: all ratios are the same.
    assert metrics["mismatch/logp_gap_mean"] == metrics["mismatch/logp_gap_max"] == 1.0
    assert metrics["mismatch/effective_share"] == pytest.approx(1.0)
