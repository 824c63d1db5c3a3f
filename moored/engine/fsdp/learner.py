"""The learner of one rank: that of one process, on shards of policy, critic and reference.

Every rank is given its own samples and makes as many passes as the one with the most, because each
pass is a collective. Gradients and figures are sums over ranks, so every rank takes the same step.
Where there is room (`fsdp/whole.py`), gradients are summed over ranks once for each update.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moored.config import Config
from moored.engine.fsdp.checkpoint import (
    load_sharded_weights,
    load_shards,
    load_whole,
    load_whole_weights,
    save_shards,
)
from moored.engine.fsdp.export import empty_twin
from moored.engine.fsdp.load import Weights
from moored.engine.fsdp.shard import Sharded, sharded
from moored.engine.fsdp.trained import ShardedTrained, own_shard, whole
from moored.engine.fsdp.whole import Whole, held_whole
from moored.engine.local.files import POLICY, has_shards, read_version
from moored.engine.local.learner import LocalLearner
from moored.engine.local.precision import keep_residual_in_float
from moored.engine.local.state import Trained
from moored.engine.lora import BASE, plain_model, plain_weights
from moored.engine.packing import TokenBatch
from moored.engine.passes import trunk_of
from moored.models.adapter import PREFIX
from moored.training.losses import Loss, ppo_clip
from moored.types import ScoreRequest

T = TypeVar("T")
_CPU = torch.device("cpu")


class ShardedLearner(LocalLearner):
    """Call every method on all ranks at once; `counts` is a group whose collectives wait for no
    device.

    A `model` on the meta device gets its `weights` after it was divided, so that no rank ever has
    more than its part of them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        mesh: DeviceMesh,
        counts: dist.ProcessGroup,
        weights: Weights | None = None,
        with_critic: bool = False,
        loss: Loss = ppo_clip,
        trains: bool = True,
    ) -> None:
        self._mesh = mesh
        self._counts = counts
        self._weights = weights
        self._sharded: dict[nn.Module, Sharded] = {}
        super().__init__(model, config, with_critic=with_critic, loss=loss, trains=trains)

    def _shard(self) -> None:
        if self.reference not in (None, self.model):
            self.reference.requires_grad_(False)
        whole = self._held_whole()
        for module in dict.fromkeys(filter(None, (self.model, self.critic, self.reference))):
            if self.bf16:
                keep_residual_in_float(module)
            self._sharded[module] = Sharded(module, self._mesh, bf16=self.bf16, whole=whole)
            self._fill(module)
        if self.reference is self.model:
            self._sharded[self.model].settle()
        self._weights = None

    def _held_whole(self) -> Whole:
        """The same on every rank: the one with the least memory decides."""
        trained = [*filter(None, (self.model, self.critic))]
        weights = [weight for module in trained for weight in module.parameters()]
        least = torch.tensor(_memory_bytes(self.device, self._mesh.size()))
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._counts)
        return held_whole(
            sum(weight.numel() for weight in weights),
            sum(weight.numel() for weight in weights if weight.requires_grad),
            int(least),
            element_bytes=2 if self.bf16 else 4,
        )

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        """Set what was on the meta device: the policy's weights, and from those all others."""
        empty = self._sharded[module].materialize(self.device)
        if module is self.model:
            own = {_plain_name(name): weight for name, weight in empty.items()}
            if own:
                assert self._weights is not None, "a model on the meta device needs weights"
                self._weights.fill(own)
            return
        source = trunk_of(self.model) if module is self.critic else self.model
        given = dict(source.named_parameters())
        for name, weight in empty.items():
            begun = given.get(name.removeprefix("trunk."))
            if begun is not None:
                weight.to_local().copy_(own_shard(begun))
            else:
                weight.to_local().zero_()  # the head of a critic

    @property
    def device(self) -> torch.device:
        """Where shards are, also before there are any."""
        kind = self._mesh.device_type
        return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else _CPU

    def _train(self, name: str, module: nn.Module, lr: float) -> Trained:
        return ShardedTrained(name, module, lr, self.config.optimizer)

    @property
    def _rounds(self) -> bool:
        return False

    def _can_record(self) -> bool:
        return False

    def _parks(self) -> bool:
        return False

    @property
    def _can_halve(self) -> bool:
        """Other ranks would wait for the passes of this one."""
        return False

    def _forward(self, module: nn.Module, compute: Callable[[], T]) -> T:
        return self._sharded[module].run(compute)

    def _add_up(self, batches: Iterable[TokenBatch]) -> dict[str, torch.Tensor]:
        return super()._add_up(self._announced(batches))

    def _announced(self, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
        """The same; before each FSDP2 is told whether it is the last of its update.

        Every rank has as many, so each is the last one on all ranks or on none.
        """
        ahead = iter(batches)
        batch = next(ahead)
        while batch is not None:
            following = next(ahead, None)
            for trained in self._trained:
                self._sharded[trained.module].begin_pass(is_last=following is None)
            yield batch
            batch = following

    def _take_in(self, lr_factor: float | None) -> None:
        super()._take_in(lr_factor)
        for trained in self._trained:
            sharded = self._sharded[trained.module]
            if lr_factor is None:
                sharded.forget_gradients()
            sharded.reshard()

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
        """Whole tensors, rounded as passes see them; a collective each, or one for all of them."""
        inner = plain_model(self.model)
        if inner is self.model and self._sharded[inner].whole.weights:
            yield from self._gather_at_once(inner)
            return
        for name, tensor in plain_weights(self.model):
            yield name, whole(tensor.to(torch.bfloat16) if self.bf16 else tensor)

    @torch.no_grad()
    def _gather_at_once(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Copies of what passes compute with: operations on hundreds of DTensors take longer."""
        state = model.state_dict()

        def copy_weights() -> list[tuple[str, torch.Tensor]]:
            own = dict(model.named_parameters(remove_duplicate=False))
            found = {name: own[name] if name in own else state[name] for name in state}
            return [(name, tensor.detach().clone()) for name, tensor in found.items()]

        return self._sharded[model].run(copy_weights)

    def exact_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same in float32, as far as they are."""
        for name, tensor in plain_weights(self.model):
            yield name, whole(tensor)

    @torch.no_grad()
    def plain_logits(self, ids: torch.Tensor, *, bf16: bool) -> torch.Tensor:
        """(T, vocabulary) of a sequence, by the model's own code and weights in float32.

        Of a copy in shards: a whole one may fit no device.
        """
        twin = Sharded(empty_twin(plain_model(self.model)), self._mesh, bf16=False)
        self._copy_plain(twin.materialize(self.device))
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = twin.run(partial(_logits, twin.root.module, ids))
        del twin
        gc.collect()  # FSDP2's hooks hold the copy in cycles
        return logits

    def _copy_plain(self, own: dict[str, DTensor]) -> None:
        """The policy's weights with adapters summed in, into shards of the same names."""
        for name, weight in plain_weights(self.model):
            into = own.pop(name, None)
            if into is not None:
                into.to_local().copy_(
                    own_shard(sharded(weight).redistribute(placements=into.placements))
                )
        assert not own, f"no values for {sorted(own)}"

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
        for parts in self._sharded.values():
            parts.reshard()
        self._version = read_version(folder)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    """Of the GPU; ranks on CPUs share the main memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None]).logits[0].float()


def _plain_name(name: str) -> str:
    """A weight's name without what peft adds to it."""
    return name.removeprefix(PREFIX).replace(BASE, ".")
