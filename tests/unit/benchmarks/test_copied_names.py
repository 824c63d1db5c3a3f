"""Copied names, counted by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def copied_names(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("copied_names")
    sys.modules.pop("copied_names", None)


def test_a_name_is_found_in_the_reasoning_and_in_the_answer(copied_names):
    reply = "<think>I look up Edda.</think><answer>search[Edda]</answer>"
    assert copied_names.parts_of(reply) == [(17, 21, "search, 1 of 2"), (45, 49, "search, 2 of 2")]


def test_a_name_is_right_when_all_of_its_tokens_are(copied_names):
    token = copied_names.Token
    found = copied_names.summarize(
        [
            token("finish, 1 of 1", 0, True, True, 0.5),
            token("finish, 1 of 1", 0, False, False, 1.5),
            token("finish, 1 of 1", 1, True, True, 0.1),
            token("rest", -1, False, True, 0.25),
        ]
    )
    assert found["finish, 1 of 1"] == {
        "tokens": 3,
        "loss": pytest.approx(0.7),
        "first_right": 1.0,
        "first_loss": pytest.approx(0.3),
        "whole_right": 0.5,
    }
    assert found["rest"] == {"tokens": 1, "loss": 0.25}
