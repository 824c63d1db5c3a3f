"""Computing in bfloat16: one rounded copy of the matrices, everything that adds up in float32.

Autocast multiplies in bfloat16 whatever it is given, and would round float32 matrices again in
every pass. Norms, biases and the residual stream between the layers stay in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from moored.engine.passes import Critic

MATRICES = (nn.Linear, nn.Embedding, Conv1D)
"""Their products are the same whether autocast rounds the weight or it is rounded already. Others,
such as scaled embeddings, may compute with the weight itself."""


def compute_in_bfloat16(module: nn.Module) -> None:
    """Round the matrices of a module in place; the value head of a critic stays exact."""
    trunk = module.trunk if isinstance(module, Critic) else module
    rounded, exact = set(), set()
    for layer in trunk.modules():
        own = rounded if type(layer) in MATRICES else exact
        own.update(id(weight) for weight in layer.parameters(recurse=False))
    for weight in trunk.parameters():
        is_matrix = weight.ndim > 1 and id(weight) in rounded - exact
        weight.data = weight.data.to(torch.bfloat16 if is_matrix else torch.float32)
    keep_residual_in_float(module)


def keep_residual_in_float(module: nn.Module) -> None:
    """Let what runs between the layers begin in float32."""
    trunk: Any = module.trunk if isinstance(module, Critic) else module
    remove_float_hook(trunk)
    trunk.get_input_embeddings().register_forward_hook(_as_float)


def remove_float_hook(module: Any) -> None:
    """Let a copy of the model run in bfloat16 throughout."""
    hooks = module.get_input_embeddings()._forward_hooks
    for key in [key for key, hook in hooks.items() if hook is _as_float]:
        del hooks[key]


def _as_float(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """The residual stream begins in float32."""
    return output.float()
