"""Layers of Llama-shaped models for training passes on a GPU: fewer passes over memory.

The matrix products stay those of the model. Norms hand on what the next products take, under
autocast bfloat16, rounded once instead of for each of them. Norms, gated units and rotations are
one kernel each, forwards and backwards.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from moored.engine.fast.tree_attention import attend_tree
from moored.engine.passes import trunk_of


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


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    dtype, device = hidden_states.dtype, hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _Norm.apply(hidden_states, self.weight, self.variance_epsilon, dtype)  # pyright: ignore


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
    q, k = (_Rotated.apply(each, cos, sin).to(v.dtype) for each in (q, k))  # pyright: ignore
    mixed: torch.Tensor = attend_tree(q, k, v, tree, self.scaling)  # pyright: ignore
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
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        from moored.engine.fast import layer_kernels

        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return layer_kernels.rotate(x.contiguous(), cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from moored.engine.fast import layer_kernels

        cos, sin = ctx.saved_tensors
        return layer_kernels.rotate(grads[0].contiguous(), cos, sin, -1.0), None, None
