"""The learner of one rank: that of one process, on shards of policy, critic and reference.

Every rank is given its own samples and makes as many passes as the one with the most, because each
pass is a collective. Gradients and figures are sums over ranks, so every rank takes the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moored.config import Config
from moored.engine.fsdp.checkpoint import (
    load_sharded_weights,
    load_shards,
    load_whole,
    load_whole_weights,
    save_shards,
)
from moored.engine.fsdp.shard import Sharded
from moored.engine.fsdp.trained import ShardedTrained, own_shard, whole
from moored.engine.local.files import POLICY, has_shards, read_version
from moored.engine.local.learner import LocalLearner
from moored.engine.local.precision import keep_residual_in_float
from moored.engine.local.state import Trained
from moored.engine.lora import plain_weights
from moored.types import ScoreRequest

T = TypeVar("T")


class ShardedLearner(LocalLearner):
    """Call every method on all ranks at once; `counts` is a group whose collectives wait for no
    device."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        mesh: DeviceMesh,
        counts: dist.ProcessGroup,
        with_critic: bool = False,
        sequence_ratio: bool = False,
        likelihood: bool = False,
        trains: bool = True,
    ) -> None:
        self._mesh = mesh
        self._counts = counts
        self._sharded: dict[nn.Module, Sharded] = {}
        super().__init__(
            model,
            config,
            with_critic=with_critic,
            sequence_ratio=sequence_ratio,
            likelihood=likelihood,
            trains=trains,
        )

    def _shard(self) -> None:
        if self.reference not in (None, self.model):
            self.reference.requires_grad_(False)
        for module in dict.fromkeys(filter(None, (self.model, self.critic, self.reference))):
            if self.bf16:
                keep_residual_in_float(module)
            self._sharded[module] = Sharded(module, self._mesh, bf16=self.bf16)

    def _train(self, name: str, module: nn.Module, lr: float) -> Trained:
        return ShardedTrained(name, module, lr, self.config.optimizer)

    @property
    def _rounds(self) -> bool:
        return False

    def _can_record(self) -> bool:
        return False

    def _forward(self, module: nn.Module, compute: Callable[[], T]) -> T:
        return self._sharded[module].run(compute)

    def _take_in(self, lr_factor: float | None) -> None:
        super()._take_in(lr_factor)
        for trained in self._trained:
            self._sharded[trained.module].reshard()

    def _num_passes(self, own: int) -> int:
        most = torch.tensor(own)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._counts)
        return int(most)

    def _over_ranks(self, totals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for is_max, how in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            names = [name for name in totals if name.endswith("_max") == is_max]
            values = torch.stack([totals[name] for name in names])
            dist.all_reduce(values, how, group=self._mesh.get_group())
            totals |= dict(zip(names, values, strict=True))
        return totals

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        if self.device.type != "cpu":
            return super().score(requests)
        # One at a time, as in one process, and as often as the rank with the most.
        found: list[list[np.ndarray]] = []
        for index in range(self._num_passes(len(requests))):
            found += super().score(requests[index : index + 1])
        return found

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time and rounded as passes see them; a collective each."""
        for name, tensor in plain_weights(self.model):
            yield name, whole(tensor.to(torch.bfloat16) if self.bf16 else tensor)

    def exact_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same in float32, as far as they are."""
        for name, tensor in plain_weights(self.model):
            yield name, whole(tensor)

    def damaged_weights(self) -> list[str]:
        """Those whose own shard is not finite."""
        return [
            name
            for name, weight in self.model.state_dict().items()
            if not own_shard(weight).isfinite().all()
        ]

    def save(self, folder: Path) -> None:
        save_shards(folder, self._trained, self._version, self._counts)

    @torch.no_grad()
    def load(self, folder: Path, *, policy_only: bool = False) -> None:
        if not has_shards(folder):
            if policy_only:
                load_whole_weights(folder, POLICY, self.model)
            else:
                load_whole(folder, self._trained)
        elif policy_only:
            load_sharded_weights(folder, POLICY, self.model, self._counts)
        else:
            load_shards(folder, self._trained, self._counts)
        for sharded in self._sharded.values():
            sharded.reshard()
        self._version = read_version(folder)
