"""What a learner writes to disk: the state to resume from, and a model that others can load.

A state holds what updates change: all weights, or under LoRA the adapters alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from moored.config_engine import OptimizerConfig
from moored.engine.local.optimizers import flat_state, load_state, make_optimizer, set_rate
from moored.engine.local.precision import compute_in_bfloat16
from moored.engine.local.staging import Staging
from moored.errors import MooredError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

State = Mapping[int, Mapping[str, torch.Tensor]]
CLIP_EPS = 1e-6
"""As torch has it: keeps the factor finite where all gradients are 0."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Weight:
    """One trained weight: what the module computes with, and what the optimiser updates."""

    used: nn.Parameter
    master: nn.Parameter
    """In float32; the same object where the module computes in float32 beside it."""
    grad: torch.Tensor | None = None
    """Sum over micro-batches where the two differ: in float32, on the module's device."""

    @property
    def is_rounded(self) -> bool:
        return self.master is not self.used

    def take(self, gradient: torch.Tensor) -> None:
        """Add the gradient of a micro-batch."""
        if self.grad is None:
            self.grad = gradient.float()
        else:
            self.grad.add_(gradient)


class Trained:
    """A module and the optimiser of its trainable weights.

    In bfloat16 the module's matrices are rounded copies of float32 master weights that only the
    optimiser holds, and gradients of micro-batches are added up in float32. With states on the host
    master weights and moments lie in main memory, and updates are made there.
    """

    def __init__(
        self, name: str, module: nn.Module, lr: float, options: OptimizerConfig, *, bf16: bool
    ) -> None:
        self.name = name
        self.module = module
        self.lr = lr
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self._on_host = options.states == "host" and self.weights[0].is_cuda
        self._trained = [self._with_master(weight, bf16) for weight in self.weights]
        if bf16:
            compute_in_bfloat16(module)
        self._staging: Staging | None = None
        is_fused = self.weights[0].is_cuda
        self.optimizer = make_optimizer(self.masters, lr, options, is_fused=is_fused)

    def _with_master(self, weight: nn.Parameter, bf16: bool) -> Weight:
        if not bf16 and not self._on_host:
            return Weight(weight, weight)
        device = "cpu" if self._on_host else weight.device
        copied = weight.detach().to(device, torch.float32, copy=True)
        own = Weight(weight, nn.Parameter(copied))
        # The gradient of a micro-batch is freed as soon as it is added. A strong reference would be
        # a cycle through autograd, which no collector finds.
        weight.register_post_accumulate_grad_hook(partial(_move_gradient, weakref.ref(own)))
        return own

    @property
    def masters(self) -> list[nn.Parameter]:
        """What the optimiser updates, in the order of `weights`."""
        return [weight.master for weight in self._trained]

    def gradients(self) -> list[torch.Tensor]:
        """Sums over the micro-batches so far, of the weights that have one."""
        found = (w.grad if w.is_rounded else w.used.grad for w in self._trained)
        return [gradient for gradient in found if gradient is not None]

    def reserve_gradients(self) -> None:
        """Have a tensor to add to for every weight, which stays where it is."""
        for weight in self._trained:
            if weight.is_rounded and weight.grad is None:
                weight.grad = torch.zeros_like(weight.used, dtype=torch.float32)
            elif not weight.is_rounded and weight.used.grad is None:
                weight.used.grad = torch.zeros_like(weight.used)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to `max_norm`; returns the norm before."""
        gradients = self.gradients()
        norm = self._total_norm(gradients)
        factor = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def _total_norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def update(self, lr_factor: float | None, *, keep_grads: bool = False) -> None:
        """Apply the gradients, or with None discard them; kept tensors stay where they are."""
        if lr_factor is not None:
            set_rate(self.optimizer, self.lr * lr_factor)
            if self._on_host:
                self._apply_on_host()
            else:
                self._apply()
        if keep_grads:
            torch._foreach_zero_(self.gradients())  # pyright: ignore[reportPrivateImportUsage]
            return
        for weight in self._trained:
            weight.grad = weight.used.grad = None

    def _apply(self) -> None:
        rounded = [weight for weight in self._trained if weight.is_rounded]
        for weight in rounded:
            weight.master.grad = weight.grad
        self.optimizer.step()
        if not rounded:
            return
        used: list[torch.Tensor] = [weight.used for weight in rounded]
        masters: list[torch.Tensor] = [weight.master for weight in rounded]
        torch._foreach_copy_(used, masters)  # pyright: ignore[reportPrivateImportUsage]
        for weight in rounded:
            weight.master.grad = None

    def _apply_on_host(self) -> None:
        """One weight at a time: there is no room for all gradients beside the states."""
        if self._staging is None:
            self._staging = Staging(self.weights)
        weights = [weight for weight in self._trained if weight.grad is not None]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for weight, gradient in zip(weights, self._staging.fetch(gradients), strict=True):
            weight.master.grad = gradient
            self.optimizer.step()
            weight.master.grad = None
            self._staging.send(weight.used, weight.master)
        self._staging.finish()

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state; a failed write is an OSError, as of any other file."""
        try:
            self._save(folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def _save(self, folder: Path) -> None:
        exact = {name: master.detach() for name, master in self._named_masters()}
        save_file(_changing(self.module) | exact, folder / f"{self.name}.safetensors")
        save_file(flat_state(self.optimizer), folder / f"{self.name}_optimizer.safetensors")

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """What updates change, by the module's names, as exactly as the optimiser has it."""
        exact = dict(self._named_masters())
        return {
            name: exact.get(name, weight).detach()
            for name, weight in self.module.named_parameters()
            if weight.requires_grad
        }

    def optimizer_state(self) -> State:
        """By the index of the weight and the name of the entry."""
        return self.optimizer.state_dict()["state"]

    def room_for_state(self, index: int, moments: Sequence[str]) -> dict[str, torch.Tensor]:
        """Zeros to load the moments of a weight into."""
        return {name: torch.zeros_like(self.masters[index]).detach() for name in moments}

    @torch.no_grad()
    def take_over(self, state: State) -> None:
        """Go on from `trained_weights` as they are now, and this state of the optimiser."""
        for weight in self._trained:
            if weight.is_rounded:
                weight.used.copy_(weight.master)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        saved = load_weights(self.module, folder / f"{self.name}.safetensors")
        for name, master in self._named_masters():
            master.copy_(saved[name])
        load_state(self.optimizer, read_tensors(folder / f"{self.name}_optimizer.safetensors"))

    def _named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Master weights that the module has only rounded, by the module's names."""
        exact = self.exact_weights
        for name, weight in self.module.named_parameters():
            if weight in exact:
                yield name, exact[weight]

    @property
    def exact_weights(self) -> dict[nn.Parameter, nn.Parameter]:
        """Master weights of those that the module has only rounded."""
        return {weight.used: weight.master for weight in self._trained if weight.is_rounded}


def _move_gradient(reference: weakref.ref[Weight], used: torch.Tensor) -> None:
    own = reference()
    assert own is not None and used.grad is not None
    own.take(used.grad)
    used.grad = None


def load_weights(module: nn.Module, file: Path) -> dict[str, torch.Tensor]:
    """Take over saved weights and return them; those of another model are refused."""
    saved = read_tensors(file)
    check_shapes(file, _changing(module), {name: tensor.shape for name, tensor in saved.items()})
    module.load_state_dict(saved, strict=False)
    return saved


def check_shapes(
    file: Path, wanted: Mapping[str, torch.Tensor], given: Mapping[str, Sequence[int]]
) -> None:
    """Raise when a file holds the weights of another model."""
    own, saved = (
        {n: tuple(s) for n, s in shapes.items()}
        for shapes in (
            {name: tensor.shape for name, tensor in wanted.items()},
            given,
        )
    )
    odd = sorted(name for name in own.keys() | saved if own.get(name) != saved.get(name))
    if odd:
        raise MooredError(
            f"{str(file)!r} does not fit the model: {len(odd)} weights differ in name or shape, "
            f"{odd[0]!r} among them; give the model and lora_rank that the run began with"
        )


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """What a file of a checkpoint holds."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise MooredError(
            f"{str(file)!r} is damaged or missing ({error}); delete the folder "
            f"{file.parent.name!r}, then the checkpoint before it is used"
        ) from error


def export_model(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write plain Hugging Face weights, with LoRA merged into the weights it sits on."""
    # The copy is made in main memory: the device may have no room for a second model.
    memo: dict[int, object] = {id(b): b.detach().to("cpu", copy=True) for b in model.buffers()}
    for parameter in model.parameters():
        twin = parameter.detach().to("cpu", copy=True)
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=False)
    plain = copy.deepcopy(model, memo)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()  # pyright: ignore[reportCallIssue]
    save_plain(plain.to(dtype), folder)  # pyright: ignore[reportCallIssue, reportArgumentType]


def save_plain(plain: nn.Module, folder: Path) -> None:
    """Write a Hugging Face model as it is; a failed write is an OSError."""
    generation = cast("GenerationConfig", plain.generation_config)
    try:
        generation.validate(strict=True)
    except ValueError:
        # Some published models set a temperature without this, and transformers refuses to save it.
        generation.do_sample = True
    try:
        plain.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer; a failed write is an OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The package tokenizers has no type of its own for what its files run into.
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


def _changing(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything except frozen weights, each storage once: safetensors refuses shared memory."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    kept: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        if name not in frozen:
            kept.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    return dict(kept.values())
