"""A sampler of one's own in place of a built-in one."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from moored.config import load_config
from moored.engine import samplers
from moored.engine.base import LockstepStream
from moored.train import build_run, start, train


class Counting:
    """Writes with the plain sampler, and counts replies and the weights that come."""

    version = 0

    def __init__(self, inner):
        self.inner, self.num_replies, self.versions = inner, 0, []

    def stream(self, params):
        return LockstepStream(self, params)

    def generate(self, requests, params):
        self.num_replies += len(requests)
        return self.inner.generate(requests, params)

    def end_sessions(self, sessions):
        self.inner.end_sessions(sessions)

    def load_weights(self, weights, version):
        self.inner.load_weights(weights, version)
        self.versions.append(version)


def make_counting(model, config, **given):
    return Counting(samplers.plain(model, config, **given))


def test_a_run_trains_with_a_sampler_of_ones_own(tmp_path):
    options = [f"engine.sampler={__name__}:make_counting", "engine.device=cpu", "num_steps=1"]
    options += ["rollout.num_groups=2", "rollout.group_size=2", "rollout.max_response_tokens=8"]
    options += ["collapse.every=0", "evaluation.every=0", "filter.rule=none", "env=bandit"]
    run = build_run(load_config({"model": "nano"}, options), tmp_path)
    start(run)
    train(run)
    assert isinstance(run.engine.sampler, Counting)
    assert run.engine.sampler.num_replies >= 4
    assert run.engine.sampler.versions == [run.engine.learner.version]
