"""A module in shards: FSDP2 for each layer, and a root for all that stands around the layers.

Small modules are one piece, whose weights and gradients are whole during an update: FSDP2's work
for every layer would take the host longer than the GPU takes to compute it.

The passes of `engine.passes` do not call the model's own `forward`: they call its trunk and use the
head's matrix as it is. FSDP2 makes weights whole only around a `forward`, so the root is a wrapper
whose `forward` runs any function: inside it embeddings, norms and head are whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from moored.engine.fsdp.whole import Whole
from moored.engine.passes import Critic, trunk_of

T = TypeVar("T")
IN_LAYERS = Whole(weights=False, gradients=False)


class Root(nn.Module):
    """Runs functions of a module while the weights around its layers are whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Sharded:
    """A module whose weights are divided among the ranks of a mesh.

    Trained weights are held in float32 and frozen ones as they are used. In bfloat16 each pass
    computes with rounded copies, and gradients are added over ranks in float32.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, *, bf16: bool, whole: Whole = IN_LAYERS
    ) -> None:
        self._bf16 = bf16
        self.whole = whole
        self._has_run = False
        self.root = Root(module)
        # A single rank's shard is the whole weight: to give copies back would save it nothing.
        self._reshards = reshards = mesh.size() > 1
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32,
            # The residual stream stays in float32.
            cast_forward_inputs=False,
        )
        for layer in () if whole.weights else layers_of(module):
            self._cast(layer)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        self._cast(self.root)
        fully_shard(self.root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.parts = [part for part in self.root.modules() if isinstance(part, FSDPModule)]
        for part in self.parts:
            part.set_reshard_after_backward(reshards)
            if mesh.size() > 1:
                # Weights of tokens have global denominators: gradients of ranks are added.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def _cast(self, module: nn.Module) -> None:
        """A layer at a time, so that there is never a second whole model."""
        for weight in module.parameters():
            if not isinstance(weight, DTensor):
                frozen = torch.bfloat16 if self._bf16 else torch.float32
                weight.data = weight.data.to(torch.float32 if weight.requires_grad else frozen)

    @torch.no_grad()
    def materialize(self, device: torch.device) -> dict[str, DTensor]:
        """Give shards on the meta device memory on `device`; returns them by the module's names.

        They hold nothing yet.
        """
        named = self.root.module.named_parameters()
        empty = {name: weight for name, weight in named if weight.is_meta}
        # FSDP2 pads its shards in there.
        self.root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        own = dict(self.root.module.named_parameters())
        return {name: sharded(own[name].detach()) for name in empty}

    @torch.no_grad()
    def settle(self) -> None:
        """Let FSDP2 fix what it does with gradients, while all that is trained says that it is.

        It does so in the first pass; that of a reference is made with adapters switched off.
        """
        self.run(lambda: None)

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with whole weights; a collective, once for each call on every rank."""
        self._has_run = True
        result = self.root(compute)
        if not torch.is_grad_enabled():
            # Else what is whole would stay so, and would not follow the weights when they change.
            self.reshard()
        return result

    def begin_pass(self, *, is_last: bool) -> None:
        """Say before a pass with gradients whether it is the last one of its update."""
        for part in self.parts:
            if self.whole.gradients:
                part.set_requires_gradient_sync(is_last, recurse=False)
            if self.whole.weights:
                part.set_reshard_after_backward(is_last and self._reshards, recurse=False)

    def forget_gradients(self) -> None:
        """Drop what was not yet summed over ranks, and end a pass that was interrupted.

        FSDP2 has no public function for the first, and for the second only from torch 2.13 on.
        """
        if not self._has_run:
            return
        for part in self.parts:
            part.set_requires_gradient_sync(True, recurse=False)
            group = part._get_fsdp_state()._fsdp_param_group
            for own in group.fsdp_params if group is not None else ():
                own.unsharded_accumulated_grad = None
                if hasattr(own, "_unsharded_param"):
                    own._unsharded_param.grad = None
        state = cast(FSDPModule, self.root)._get_fsdp_state()
        # What a backward pass ends with. Without gradients it sums none, so no rank is waited for.
        state._root_post_backward_final_callback()
        state._state_ctx.iter_forward_root = None

    def reshard(self) -> None:
        """Give whole weights back, e.g. because shards have changed."""
        for part in self.parts:
            part.reshard()


def sharded(weight: torch.Tensor) -> DTensor:
    """A weight that is known to be divided among ranks."""
    assert isinstance(weight, DTensor)
    return weight


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model or critic."""
    trunk = module.trunk if isinstance(module, Critic) else trunk_of(module)
    for stack in trunk.children():
        if isinstance(stack, nn.ModuleList):
            yield from stack
