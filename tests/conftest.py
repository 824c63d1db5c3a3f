"""Fixtures every test may use, and what must not differ from machine to machine."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# A developer's own settings: colours in pipes, a proxy between a test and its local server, a key.
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "OPENAI_API_KEY"):
    os.environ.pop(_name, None)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
# Tests run in parallel, one process per core: threads of torch would wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test cuts the power: waiting for the disk after every file is most of the time of some of them.
os.fsync = os.fstat  # type: ignore[assignment]
# What is imported and collected stays: looking for garbage in it takes a second in every process.
gc.disable()
# A test run in the background inherits an ignored Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collection: it stays to the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def toy_tokenizer() -> ModuleType:
    """The module `unit/toy_tokenizer.py`: small tokenizers with chat templates, made in memory."""
    pytest.importorskip("transformers")
    return _load("unit/toy_tokenizer.py")


@pytest.fixture(scope="session")
def chat_server() -> ModuleType:
    """The module `chat_server.py`: a local HTTP server that stands for an endpoint."""
    return _load("chat_server.py")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A real Ray cluster of two nodes that notices a lost one in seconds; leaves nothing behind."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 100_000_000}
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
    # A lost node refuses connections at once; a busy one only answers late.
    quick |= {"health_check_timeout_ms": 20_000, "health_check_failure_threshold": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
        made = Cluster(initialize_head=True, head_node_args={**small, "_system_config": quick})
        made.add_node(**small)  # pyright: ignore[reportArgumentType]
        yield made
        made.shutdown()


def _load(file: str) -> ModuleType:
    path = Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
