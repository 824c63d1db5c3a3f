"""Layers of Llama-shaped models for training passes on a GPU: fewer passes over memory.

The matrix products stay those of the model. Norms hand on what the next products take, under
autocast bfloat16, rounded once instead of for each of them. Norms, gated units and rotations are
one kernel each, forwards and backwards. A sum of the residual stream is made by the norm behind it:
layers hand on the stream and what is still to be added.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from moored.engine.fast.tree_attention import attend_tree
from moored.engine.passes import trunk_of

CALL_CHECKPOINTS = "__call__" in vars(GradientCheckpointingLayer)
"""Where gradient checkpointing sits: up to transformers 5.22 in a layer's `__call__`, which wraps
any `forward`; from 5.23 on in the model's own `forward`, which `fuse_layers` replaces."""
Stream = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The residual stream between two layers, or the two summands that it is made of."""


def fuse_layers(model: nn.Module) -> None:
    """Let the layers of a model that `use_tree_attention` switched over use the kernels."""
    trunk: Any = trunk_of(model)
    is_silu = trunk.config.hidden_act == "silu"
    for layer in trunk.layers:
        attention = layer.self_attn
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [
            getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        ]
        for each in norms:
            each.forward = MethodType(_norm_forward, each)
        if is_silu:
            layer.mlp.forward = MethodType(_mlp_forward, layer.mlp)
        attention.forward = MethodType(_attention_forward, attention)
        layer.forward = MethodType(_layer_forward, layer)
    trunk.norm.forward = MethodType(_last_norm_forward, trunk.norm)


def _layer_forward(self: Any, hidden_states: Stream, **kwargs: Any) -> Stream:
    """On a line of packed tokens; any other pass is the model's own."""
    if kwargs.get("tree") is None:
        return type(self).forward(self, hidden_states, **kwargs)
    if self.gradient_checkpointing and self.training and not CALL_CHECKPOINTS:
        again = partial(_fused_layer, self, **kwargs)
        return self._gradient_checkpointing_func(again, hidden_states)
    return _fused_layer(self, hidden_states, **kwargs)


def _fused_layer(self: Any, hidden_states: Stream, **kwargs: Any) -> Stream:
    stream, normed = _add_norm(self.input_layernorm, hidden_states)
    stream = stream, self.self_attn(hidden_states=normed, **kwargs)[0]
    stream, normed = _add_norm(self.post_attention_layernorm, stream)
    found = self.mlp(normed)
    if self.gradient_checkpointing and self.training:
        # What is handed on is kept until the backward pass: one tensor is less than two.
        return stream + found
    return stream, found


def _last_norm_forward(self: Any, hidden_states: Stream) -> torch.Tensor:
    if isinstance(hidden_states, tuple):
        hidden_states = hidden_states[0] + hidden_states[1]
    return type(self).forward(self, hidden_states)


def _add_norm(norm: Any, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream, summed up, and its norm."""
    if isinstance(stream, torch.Tensor):
        return stream, norm(stream)
    options = norm.weight, norm.variance_epsilon, _norm_dtype(stream[0])
    return _AddNorm.apply(*stream, *options)  # pyright: ignore[reportReturnType]


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    dtype = _norm_dtype(hidden_states)
    return _Norm.apply(hidden_states, self.weight, self.variance_epsilon, dtype)  # pyright: ignore


def _norm_dtype(x: torch.Tensor) -> torch.dtype:
    """What the products behind a norm compute with."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))


def _attention_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[Any, None]:
    """On a line of packed tokens; any other pass is the model's own."""
    tree = kwargs.get("tree")
    if tree is None:
        return type(self).forward(self, hidden_states, **kwargs)
    shape = (hidden_states.shape[1], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (angles[0] for angles in kwargs["position_embeddings"])
    q, k = _Rotated.apply(q, k, cos, sin)  # pyright: ignore
    mixed: torch.Tensor = attend_tree(q.to(v.dtype), k.to(v.dtype), v, tree, self.scaling)  # pyright: ignore
    return self.o_proj(mixed.reshape(1, shape[0], -1)), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        from moored.engine.fast import layer_kernels

        flat = x.reshape(-1, x.shape[-1])
        out, scales = layer_kernels.norm(flat, weight, eps, dtype)
        ctx.save_for_backward(flat, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from moored.engine.fast import layer_kernels

        x, weight, scales = ctx.saved_tensors
        grad = grads[0].reshape(x.shape).contiguous()
        d_x, d_weight = layer_kernels.norm_backward(grad, x, weight, scales)
        return d_x.view(grads[0].shape), d_weight.to(weight.dtype), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from moored.engine.fast import layer_kernels

        total, out, scales = layer_kernels.add_norm(
            x.contiguous(), delta.contiguous(), weight, eps, dtype
        )
        ctx.save_for_backward(total, weight, scales)
        ctx.dtype = delta.dtype
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from moored.engine.fast import layer_kernels

        total, weight, scales = ctx.saved_tensors
        d_total, grad = (each.contiguous() for each in grads)
        d_x, d_delta, d_weight = layer_kernels.add_norm_backward(
            grad, d_total, total, weight, scales, ctx.dtype
        )
        return d_x, d_delta, d_weight.to(weight.dtype), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        from moored.engine.fast import layer_kernels

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return layer_kernels.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from moored.engine.fast import layer_kernels

        return layer_kernels.silu_mul_backward(grads[0].contiguous(), *ctx.saved_tensors)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from moored.engine.fast import layer_kernels

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return layer_kernels.rotate(q.contiguous(), k.contiguous(), cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from moored.engine.fast import layer_kernels

        cos, sin = ctx.saved_tensors
        d_q, d_k = (grad.contiguous() for grad in grads)
        return *layer_kernels.rotate(d_q, d_k, cos, sin, -1.0), None, None
