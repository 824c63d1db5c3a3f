"""What is refused before a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from moored.config import load_config  # noqa: E402
from moored.engine.build import build_engine  # noqa: E402
from moored.engine.vllm import support  # noqa: E402
from moored.errors import MooredError  # noqa: E402
from tests.unit.engine.vllm.fake_vllm import install  # noqa: E402


def check(*words: str) -> None:
    support.check_vllm(load_config({}, ["engine.sampler=vllm", "engine.device=cpu", *words]))


def test_a_missing_vllm_is_told_before_the_model_is_loaded(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    monkeypatch.setattr("moored.engine.local.engine.load_model", None)
    config = load_config({}, ["engine.sampler=vllm"])
    with pytest.raises(MooredError, match=r"engine\.sampler=vllm needs packages .*moored\[vllm\]"):
        build_engine(config)


@pytest.mark.parametrize("version", ["0.21.9", "0.8.5.post1"])
def test_an_old_vllm_is_refused_with_the_version_it_takes(monkeypatch, version):
    install(monkeypatch, version)
    with pytest.raises(MooredError, match=rf"needs vLLM 0\.22 or newer, but this is {version};"):
        check()


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0+cpu", "1.0", "0.0.0.dev0"])
def test_newer_releases_and_builds_from_source_are_taken(monkeypatch, version):
    install(monkeypatch, version)
    check()


def test_a_class_that_vllm_does_not_know_is_refused(monkeypatch, tmp_path):
    install(monkeypatch)
    described = {"architectures": ["OddForCausalLM"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(MooredError, match="no code for models of class OddForCausalLM; set"):
        check(f"model={tmp_path}")


def test_a_context_longer_than_the_models_is_refused_unless_its_angles_are_scaled(
    monkeypatch, tmp_path
):
    install(monkeypatch)
    described = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(MooredError, match=r"max_context = 1025 is longer .* lower it to 1024"):
        check(f"model={tmp_path}", "rollout.max_context=1025")
    check(f"model={tmp_path}", "rollout.max_context=1024")
    described["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(described))
    check(f"model={tmp_path}", "rollout.max_context=1025")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["engine.vllm.tensor_parallel=3"], "does not divide the 4 attention heads of this model"),
        (
            ["engine.vllm.tensor_parallel=2", "engine.kind=torchrun"],
            "the vLLM of a rank has the GPU of the rank alone; leave it out",
        ),
        (
            ["engine.vllm.tensor_parallel=2", "engine.vllm.server=http://127.0.0.1:9"],
            "divides its model as it was started; leave it out",
        ),
    ],
)
def test_tensor_parallelism_that_cannot_be_is_refused(monkeypatch, words, why):
    install(monkeypatch)
    with pytest.raises(MooredError, match=why):
        check("model=nano", *words)


def test_fewer_gpus_than_parts_of_a_model_are_refused(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(support, "pick_device", lambda name: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80, 80))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MooredError, match="= 2 needs as many GPUs, but 1 are visible; lower it"):
        check("model=nano", "engine.vllm.tensor_parallel=2")


def test_another_gpu_than_the_first_is_refused(monkeypatch):
    install(monkeypatch)
    with pytest.raises(MooredError, match=r"set CUDA_VISIBLE_DEVICES=1 and engine\.device"):
        check("engine.device=cuda:1")


def test_a_share_of_memory_that_is_not_free_is_refused(monkeypatch):
    install(monkeypatch)
    on_gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(support, "pick_device", lambda name: on_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 2**30, 80 * 2**30))
    with pytest.raises(MooredError, match=r"asks for 32\.0 GiB of GPU memory, but 20\.0 GiB"):
        check()
    check("engine.vllm.memory_share=0.25")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_processes_of_vllm_are_not_forked_where_there_is_a_gpu(monkeypatch, has_gpu):
    install(monkeypatch)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    support.import_vllm()
    assert os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD", "fork") == (
        "spawn" if has_gpu else "fork"
    )


def test_vllm_computes_in_this_process_and_keeps_what_is_set(monkeypatch):
    install(monkeypatch)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    support.import_vllm()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
