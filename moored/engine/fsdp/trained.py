"""The optimiser of a sharded module: every rank updates its own shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moored.config_engine import OptimizerConfig
from moored.engine.fsdp.shard import sharded
from moored.engine.local.state import State, Trained, Weight


class ShardedTrained(Trained):
    """Works on shards as plain tensors that share their memory.

    Operations on DTensors think about communication first, which takes longer than these do.
    """

    def __init__(self, name: str, module: nn.Module, lr: float, options: OptimizerConfig) -> None:
        super().__init__(name, module, lr, options, bf16=False)

    def _with_master(self, weight: nn.Parameter, bf16: bool) -> Weight:
        return Weight(weight, nn.Parameter(own_shard(weight.detach())))

    def gradients(self) -> list[torch.Tensor]:
        found = (weight.grad for weight in self.weights)
        return [own_shard(gradient) for gradient in found if gradient is not None]

    def _total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square, group=sharded(self.weights[0]).device_mesh.get_group())
        return square.sqrt()

    def _apply(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad = own_shard(weight.grad)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def trained_weights(self) -> dict[str, torch.Tensor]:
        named = self.module.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad}

    def optimizer_state(self) -> State:
        return {
            index: {name: _like(self.weights[index], value) for name, value in entry.items()}
            for index, entry in super().optimizer_state().items()
        }

    def room_for_state(self, index: int, moments: Sequence[str]) -> dict[str, torch.Tensor]:
        plain = super().room_for_state(index, moments)
        return {name: _like(self.weights[index], value) for name, value in plain.items()}

    def take_over(self, state: State) -> None:
        own = {
            index: {name: own_shard(value) for name, value in entry.items()}
            for index, entry in state.items()
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": own})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, from the shards of all ranks; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(weight: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor divided among ranks as a weight is."""
    like = sharded(weight)
    own = tensor.to(like.to_local().device, like.dtype)
    return distribute_tensor(own, like.device_mesh, like.placements)


def _like(weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A shard of a moment as a part of the whole; a number of steps is as it is."""
    whole = sharded(weight)
    if shard.ndim == 0:
        return shard
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )
