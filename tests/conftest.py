"""Fixtures every test may use."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def toy_tokenizer() -> ModuleType:
    """The module `unit/toy_tokenizer.py`: small tokenizers with chat templates, made in memory."""
    pytest.importorskip("transformers")
    return _load("unit/toy_tokenizer.py")


@pytest.fixture(scope="session")
def chat_server() -> ModuleType:
    """The module `chat_server.py`: a local HTTP server that stands for an endpoint."""
    return _load("chat_server.py")


def _load(file: str) -> ModuleType:
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
