"""A module that stands for `vllm`: its engine writes token after token, as a table says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from moored.engine.vllm.support import SETTINGS


@dataclass(kw_only=True)
class FakeParams:
    """`vllm.SamplingParams`."""

    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    detokenize: bool


@dataclass
class _Row:
    prompt: list[int]
    params: FakeParams
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """`LLMEngine`: token t of a reply is the prompt's first id plus t, its log-probability -t/2."""

    def __init__(self, max_model_len: int) -> None:
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.rows: dict[str, _Row] = {}
        self.asked: list[tuple[list[int], FakeParams]] = []
        self.calls: list[str] = []
        self.weights: list[dict[str, Any]] = []
        self.folders: list[Path] = []
        """That weights were read from."""
        self.updates: list[tuple[Any, ...]] = []
        self.factor = -0.5
        self.finish_reason: str | None = None

    def add_request(self, name: str, prompt: Mapping[str, list[int]], params: FakeParams) -> str:
        self.rows[name] = _Row(prompt["prompt_token_ids"], params)
        self.asked.append((prompt["prompt_token_ids"], params))
        return name + "-internal"

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for name, row in list(self.rows.items()):
            row.tokens.append(row.prompt[0] + len(row.tokens))
            is_stop = row.tokens[-1] in row.params.stop_token_ids
            is_done = is_stop or len(row.tokens) == row.params.max_tokens
            if is_done:
                del self.rows[name]
            outputs.append(self._output(name, row, is_done, "stop" if is_stop else "length"))
        return outputs

    def _output(self, name: str, row: _Row, is_done: bool, why: str) -> SimpleNamespace:
        found = [
            {token: SimpleNamespace(logprob=self.factor * t)} for t, token in enumerate(row.tokens)
        ]
        reply = SimpleNamespace(
            token_ids=tuple(row.tokens),
            logprobs=found,
            finish_reason=(self.finish_reason or why) if is_done else None,
        )
        return SimpleNamespace(
            request_id=name, finished=is_done, outputs=[reply], num_cached_tokens=3
        )

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.rows[name]
        self.calls.append(f"abort {len(names)}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.calls.append(method)
        asked = kwargs or {}
        if "weights_iterator" in asked:
            self.weights.append(dict(asked["weights_iterator"]))
        elif "weights_path" in asked:
            self.folders.append(Path(asked["weights_path"]))
            files = sorted(self.folders[-1].glob("*.safetensors"))
            self.weights.append({k: t for file in files for k, t in load_file(file).items()})
        else:
            self.updates.append(args)

    def apply_model(self, function: Callable[[Any], object]) -> None:
        self.calls.append("load_weights")
        function(SimpleNamespace(load_weights=lambda given: self.weights.append(dict(given))))


class FakeLLM:
    """`vllm.LLM`, with the options that it was made with and the folder's files."""

    made: list[FakeLLM]
    refusal: str | None

    def __init__(self, model: str, **options: Any) -> None:
        if type(self).refusal is not None:
            raise ValueError(type(self).refusal)
        self.model = model
        self.options = options
        self.llm_engine = FakeEngine(options["max_model_len"])
        type(self).made.append(self)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> type[FakeLLM]:
    """Have `import vllm` find the fake, at some version; returns its class `LLM`."""
    kind = type("LLM", (FakeLLM,), {"made": [], "refusal": None})
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    archs = ["LlamaForCausalLM", "Qwen2ForCausalLM"]
    registry = SimpleNamespace(get_supported_archs=lambda: archs)
    vars(module).update(LLM=kind, SamplingParams=FakeParams, ModelRegistry=registry)
    distributed = ModuleType("vllm.distributed")
    vars(distributed)["cleanup_dist_env_and_memory"] = lambda: None
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setattr("moored.engine.vllm.support.installed_version", lambda: version)
    # What the code sets in the environment is taken back at the end of the test.
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", *SETTINGS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return kind
