"""The planned peak of an update is that of the engine's own passes, followed allocation by
allocation on tensors without data.

The kernels of head and layers are for GPUs alone; here they are replaced by what they allocate.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from moored.models.known import KNOWN
from moored.models.shapes import ModelShape, shape_from_config
from moored.plan import activations
from moored.plan.activations import (
    backward_work_bytes,
    forward_bytes,
    prefill_bytes,
    saved_bytes,
)
from moored.plan.setup import LayerKind
from tests.unit.plan.test_activations import use_bare_attention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
passes = pytest.importorskip("moored.engine.passes")
decoders = pytest.importorskip("moored.engine.fast.decoder")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.unit.engine.fast.plain_kernels import use_plain_kernels  # noqa: E402

LAYERS = 2
NORM_PROGRAMS = 1024
"""`layer_kernels.NORM_PROGRAMS`; that file cannot be imported without Triton."""
CHUNK = 1 << 24
MOST_OFF = 0.03
"""The last chunk of logits may be smaller than the others; plans take it to be as large."""


class Allocations(TorchDispatchMode):
    """Bytes of all tensors that are alive, but for those of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@pytest.fixture(autouse=True)
def head_of_a_gpu(monkeypatch):
    """Allocate what the kernels of a GPU do, and compute nothing."""

    def summarize(logits, targets, beta, *, with_entropy):
        return tuple(logits.new_empty(len(logits)) for _ in range(3))

    def slopes(logits, *rest):
        return torch.empty_like(logits, dtype=rest[-1])

    def float_logits(hidden, weight):
        return hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)

    monkeypatch.setattr(passes, "_head_operations", lambda kind: (summarize, slopes))
    monkeypatch.setattr(passes, "float_logits", float_logits)
    monkeypatch.setattr(passes, "_add_product", lambda total, left, right: None)
    monkeypatch.setattr(passes, "LOGITS_PER_CHUNK", {"cpu": CHUNK, "cuda": CHUNK})
    monkeypatch.setattr(activations, "LOGITS_PER_CHUNK", CHUNK)


@pytest.fixture(autouse=True)
def layers_of_a_gpu(monkeypatch):
    """Likewise, for what lies between the products of fused layers."""

    def norm(x, weight, eps, dtype):
        roots = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        return torch.empty_like(x, dtype=dtype), roots

    def norm_backward(grad, x, weight, scales):
        rows = min(NORM_PROGRAMS, x.numel() // x.shape[-1])
        parts = x.new_empty(rows, len(weight), dtype=torch.float32)
        return torch.empty_like(x), parts.sum(dim=0)

    def add_norm(x, delta, weight, eps, dtype):
        return torch.empty_like(x), *norm(x, weight, eps, dtype)

    def add_norm_backward(grad, d_total, total, weight, scales, dtype):
        d_x, d_weight = norm_backward(grad, total, weight, scales)
        return d_x, torch.empty_like(total, dtype=dtype), d_weight

    def silu_mul_backward(grad, gate, up):
        return torch.empty_like(gate), torch.empty_like(up)

    kernels = SimpleNamespace(
        norm=norm,
        norm_backward=norm_backward,
        add_norm=add_norm,
        add_norm_backward=add_norm_backward,
        silu_mul=lambda gate, up: torch.empty_like(gate),
        silu_mul_backward=silu_mul_backward,
        rotate=lambda q, k, cos, sin, sign: (torch.empty_like(q), torch.empty_like(k)),
    )
    use_plain_kernels(monkeypatch, kernels)


def make_model(config: Any, kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In bfloat16, with norms and residual stream in float32."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    use_bare_attention(model, monkeypatch, is_fused=kind == "fused")
    for layer in model.modules():
        if "Norm" in type(layer).__name__:
            layer.weight = torch.nn.Parameter(layer.weight.float())
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: output.float())
    return model


def update_peak(model: Any, tokens: int, *, checkpointing: bool) -> tuple[int, int]:
    """Bytes after the forward pass of a policy, and at the peak of the backward pass."""
    if checkpointing:
        passes.compute_layers_twice(model)
        for layer in model.modules():
            layer.training = hasattr(layer, "gradient_checkpointing")
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    line = torch.zeros(1, tokens, dtype=torch.long)
    with Allocations(model) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(
                input_ids=line.clone(),
                position_ids=line.clone(),
                attention_mask=torch.zeros(1, 1, 1, 1),
                use_cache=False,
                tree=object(),
            ).last_hidden_state
            hidden = hidden.reshape(tokens, -1).index_select(0, line[0])
            found = passes.token_logprobs(
                model, hidden, line[0], temperature=1.0, with_entropy=True
            )
            loss = (found[0] + found[1]).sum()
            del hidden, found
        after_forward = seen.now
        loss.backward()
    return after_forward, seen.peak


def config_and_shape(model: str) -> tuple[Any, ModelShape]:
    facts = asdict(replace(KNOWN[model], num_hidden_layers=LAYERS))
    config = transformers.AutoConfig.for_model(facts.pop("model_type"), **facts)
    return config, shape_from_config(config.to_dict(), model)


NAMES, KINDS = ("Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-7B"), ("fused", "bfloat16")
HALF_OF_ALL = [
    (KINDS[k], bool(c), (1024, 8192)[(k + c + n) % 2], NAMES[n])
    for k, c, n in itertools.product(range(2), repeat=3)
]
"""Every three of the four with all of their values."""


@pytest.mark.parametrize(("kind", "checkpointing", "tokens", "name"), HALF_OF_ALL)
def test_the_peak_of_an_update_is_as_planned(name, tokens, checkpointing, kind, monkeypatch):
    config, shape = config_and_shape(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model(config, kind, monkeypatch)
        forward, peak = update_peak(model, tokens, checkpointing=checkpointing)
    saved = saved_bytes(shape, tokens, kind, checkpointing=checkpointing)
    work = backward_work_bytes(shape, tokens, kind, checkpointing=checkpointing)
    # Three numbers for each token of the loss are left out.
    assert forward == pytest.approx(saved, rel=1e-3)
    assert peak == pytest.approx(saved + work, rel=MOST_OFF)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-7B"])
@pytest.mark.parametrize("kind", ["fused", "bfloat16"])
def test_the_peak_of_a_pass_without_gradients_is_as_planned(name, kind, monkeypatch):
    config, shape = config_and_shape(name)
    line = torch.zeros(1, 1024, dtype=torch.long)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = make_model(config, kind, monkeypatch)
        with Allocations(model) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
            model.model(
                input_ids=line.clone(),
                position_ids=line.clone(),
                attention_mask=torch.zeros(1, 1, 1, 1),
                use_cache=False,
                tree=object(),
            )
    # Ids and places are left out.
    assert seen.peak == pytest.approx(1024 * forward_bytes(shape, kind), rel=1e-3)


def without_kernels(x, mixed, layer, eps, y):
    """What `kernels.finish_layer` allocates for many tokens."""
    inner = x.new_empty((len(x), len(layer["gate_up"]) // 2), dtype=y.dtype)
    linear = torch.nn.functional.linear
    linear(mixed, layer["out"], layer["out_bias"])
    linear(y, layer["gate_up"])
    return linear(inner, layer["down"])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-7B"])
def test_the_peak_of_reading_prompts_is_as_planned(name, monkeypatch):
    # There are no values to copy.
    monkeypatch.setattr(decoders.Decoder, "load", lambda *_: None)
    config, shape = config_and_shape(name)
    ids = torch.zeros(1024, dtype=torch.long)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        decoder = decoders.Decoder(model, torch.bfloat16, shares=True)
        # The kernels write into what they are given.
        decoder.ops = SimpleNamespace(
            add_norm=lambda x, delta, weight, eps, out: out,
            embed_norm=lambda ids, embedding, weight, eps, out: out.new_empty(
                out.shape, dtype=torch.float32
            ),
            linear=lambda *given, most_parts: torch.nn.functional.linear(*given),
            parts_of_heads=lambda *_: 1,
            attend=lambda *_: None,
            finish_layer=without_kernels,
        )
        cache = decoder.new_cache(1, 1)
        with Allocations(model) as seen:
            decoder.forward(cache, ids, SimpleNamespace(plan=object()))  # pyright: ignore
    assert seen.peak == pytest.approx(1024 * prefill_bytes(shape, bf16=True), rel=1e-3)
