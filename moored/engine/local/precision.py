"""Computing in bfloat16: one rounded copy of the matrices, everything that adds up in float32.

Autocast multiplies in bfloat16 whatever it is given, and would round float32 matrices again in
every pass. Norms, biases and the residual stream between the layers stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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


@contextmanager
def in_float32(module: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """While it lasts the module computes in float32, with exact weights where `masters` has them.

    A part has float32 weights while it runs: those of the whole might not fit beside what is there.
    """
    rounded: dict[nn.Parameter, torch.Tensor] = {}

    def widen(part: nn.Module, *_: object) -> None:
        for weight in part.parameters():
            rounded[weight] = weight.data
            weight.data = masters.get(weight, weight.data).detach().to(weight.device, torch.float32)

    def narrow(part: nn.Module, *_: object) -> None:
        for weight in part.parameters():
            if weight in rounded:
                weight.data = rounded.pop(weight)

    with ExitStack() as stack:
        # Layers that are compiled would be compiled again, for other types.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for part in _parts(module):
            stack.enter_context(part.register_forward_pre_hook(widen))
            # Also where the part raises.
            stack.enter_context(part.register_forward_hook(narrow, always_call=True))
        yield


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Layers, and what stands before and after them; none lies inside another."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif any(isinstance(part, nn.ModuleList) for part in module.modules()):
        for part in module.children():
            yield from _parts(part)
    else:
        yield module


def _as_float(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """The residual stream begins in float32."""
    return output.float()
