"""Engines by name, and the message where one cannot be built."""

from __future__ import annotations

import sys

import pytest

from moored.config import load_config
from moored.engine.build import build_engine, load_scorer
from moored.errors import ConfigError, MooredError, UnknownNameError


def test_a_typo_is_told_with_the_configuration():
    with pytest.raises(ConfigError, match="unknown engine 'locl'; did you mean 'local'"):
        load_config(None, ["engine.kind=locl"])


def test_a_typo_in_the_sampler_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        load_config(None, ["engine.sampler=plane"])


def test_a_scorer_of_an_unknown_dtype_is_refused_before_a_model_is_loaded():
    with pytest.raises(MooredError, match="did you mean 'float32'"):
        load_scorer("nano", dtype="float23")


def test_an_engine_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MooredError, match=r"needs packages .*torch.*; run: pip install 'moored\[train\]'"
    ):
        build_engine(load_config())


def test_an_engine_of_ones_own_that_cannot_be_imported_is_named():
    with pytest.raises(UnknownNameError, match="no module named 'absent_engine'"):
        build_engine(load_config(None, ["engine.kind=absent_engine:Mine"]))


def test_what_a_server_serves_cannot_be_trained():
    server = ["engine.kind=endpoint", "engine.endpoint.url=http://localhost:9/v1"]
    with pytest.raises(MooredError, match=r"cannot be trained; set engine\.kind to local"):
        build_engine(load_config(None, server))
    engine = build_engine(load_config(None, server), trains=False)
    with pytest.raises(MooredError, match="cannot be trained or loaded"):
        _ = engine.learner
