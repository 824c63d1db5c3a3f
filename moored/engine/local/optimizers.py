"""AdamW with its moments in float32 or in 8 bits, and its state as plain tensors.

A moment in 8 bits is several tensors: codes, the scale of each block, and what the codes mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moored.config_engine import OptimizerConfig
from moored.errors import require_packages


def check_optimizer(options: OptimizerConfig) -> None:
    """Refuse an optimiser whose package is missing, before a model is loaded."""
    if options.kind == "adamw_8bit":
        require_packages("optimizer.kind=adamw_8bit", ("torchao",))


def make_optimizer(
    weights: Sequence[nn.Parameter], lr: float, options: OptimizerConfig, *, is_fused: bool
) -> torch.optim.Optimizer:
    """AdamW as `optimizer.kind` says."""
    decay = options.weight_decay
    if options.kind == "adamw":
        return torch.optim.AdamW(weights, lr=lr, weight_decay=decay, fused=is_fused or None)
    check_optimizer(options)
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(weights, lr=lr, weight_decay=decay)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next update; a compiled optimiser keeps its rate in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Tensors by weight and name, and by part where one consists of several."""
    found: dict[str, torch.Tensor] = {}
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if is_traceable_wrapper_subclass(value):
                parts, _ = value.__tensor_flatten__()
                found |= {f"{index}.{name}.{part}": getattr(value, part) for part in parts}
            else:
                found[f"{index}.{name}"] = torch.as_tensor(value)
    # Some parts are alike for all weights; safetensors refuses shared memory.
    return {key: tensor.clone().contiguous() for key, tensor in found.items()}


def load_state(optimizer: torch.optim.Optimizer, flat: Mapping[str, torch.Tensor]) -> None:
    """Go back to what `flat_state` returned."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for key, tensor in flat.items():
        index, name, *part = key.split(".")
        if part:
            parts.setdefault((int(index), name), {})[part[0]] = tensor
        else:
            state.setdefault(int(index), {})[name] = tensor
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for (index, name), found in parts.items():
        device = weights[index].device
        moved = {part: tensor.to(device) for part, tensor in found.items()}
        state.setdefault(index, {})[name] = _eight_bits(moved)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _eight_bits(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    require_packages("a checkpoint of adamw_8bit", ("torchao",))
    from torchao.optim.subclass_8bit import OptimState8bit  # pyright: ignore[reportMissingImports]

    is_signed = bool((parts["qmap"] < 0).any())
    return OptimState8bit(**parts, signed=is_signed, dtype=torch.float32)
