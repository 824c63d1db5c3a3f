"""Loss and gradients of one batch, on a GPU replayed as one recorded graph for each batch shape.

A step of a model this small is thousands of short kernels: launching them one by one takes several
times as long as running them. Shape legend: B dialogues of a batch, T tokens, padded at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM

IGNORED = -100
"""Label of a token that is not learnt."""

GradientFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids_BT, labels_BT) -> loss; adds to the gradients of the model."""

CAUSAL = "plain_causal"


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention without a mask: padding at the end is seen by padding alone."""
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


# A name without a mask function: transformers then builds no mask. Building one would read values
# back from the device, which a recording does not allow.
AttentionInterface.register(CAUSAL, causal_attention)


def gradient_fn(model: LlamaForCausalLM, *, use_graphs: bool) -> GradientFn:
    """How to get the gradients of a batch; gradients must be zeroed in place between steps."""
    if use_graphs:
        return GraphedGradients(model)
    return lambda ids_BT, labels_BT: add_gradients(model, ids_BT, labels_BT)


def add_gradients(
    model: LlamaForCausalLM, ids_BT: torch.Tensor, labels_BT: torch.Tensor
) -> torch.Tensor:
    """Add the gradients of a batch to what is there; returns the loss per learnt token."""
    with _autocast(ids_BT.device):
        logits = model(input_ids=ids_BT, use_cache=False).logits
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
    loss.backward()
    return loss.detach()


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A CUDA graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    loss: torch.Tensor


class GraphedGradients:
    """`add_gradients`, recorded when a batch shape is first seen and replayed from then on."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._recordings: dict[torch.Size, Recording] = {}

    def __call__(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        if ids_BT.shape not in self._recordings:
            self._recordings[ids_BT.shape] = self._record(ids_BT.clone(), labels_BT.clone())
        recording = self._recordings[ids_BT.shape]
        recording.ids_BT.copy_(ids_BT)
        recording.labels_BT.copy_(labels_BT)
        recording.graph.replay()
        return recording.loss.clone()

    def _record(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> Recording:
        # A real run first: libraries set themselves up, and every gradient gets its memory, to
        # which all recordings then add.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                add_gradients(self._model, ids_BT, labels_BT)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Recordings never run at the same time, so they can share their working memory.
        first = next(iter(self._recordings.values()), None)
        with torch.cuda.graph(graph, pool=None if first is None else first.graph.pool()):
            loss = add_gradients(self._model, ids_BT, labels_BT)
        self._model.zero_grad(set_to_none=False)
        return Recording(graph, ids_BT, labels_BT, loss)
