"""What a learner writes to disk: the state to resume from, and a model that others can load.

A state holds what updates change: all weights, or under LoRA the adapters alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from moored.errors import MooredError

if TYPE_CHECKING:
    from transformers import GenerationConfig


class Trained:
    """A module and the optimiser of its trainable weights."""

    def __init__(self, name: str, module: nn.Module, lr: float, weight_decay: float) -> None:
        self.name = name
        self.module = module
        self.lr = lr
        self.weights = [p for p in module.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.weights, lr=lr, weight_decay=weight_decay, fused=self.weights[0].is_cuda or None
        )

    def update(self, lr_factor: float | None, *, keep_grads: bool = False) -> None:
        """Apply the gradients, or with None discard them; kept tensors stay where they are."""
        if lr_factor is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * lr_factor
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keep_grads)

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state; a failed write is an OSError, as of any other file."""
        try:
            self._save(folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def _save(self, folder: Path) -> None:
        save_file(_changing(self.module), folder / f"{self.name}.safetensors")
        state = {
            f"{index}.{name}": torch.as_tensor(value).contiguous()
            for index, entry in self.optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        save_file(state, folder / f"{self.name}_optimizer.safetensors")

    def load(self, folder: Path) -> None:
        load_weights(self.module, folder / f"{self.name}.safetensors")
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in _read(folder / f"{self.name}_optimizer.safetensors").items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def load_weights(module: nn.Module, file: Path) -> None:
    """Take over saved weights; those of another model are refused."""
    saved = _read(file)
    shapes = {name: tensor.shape for name, tensor in _changing(module).items()}
    given = {name: tensor.shape for name, tensor in saved.items()}
    odd = sorted(name for name in shapes.keys() | given if shapes.get(name) != given.get(name))
    if odd:
        raise MooredError(
            f"{str(file)!r} does not fit the model: {len(odd)} weights differ in name or shape, "
            f"{odd[0]!r} among them; give the model and lora_rank that the run began with"
        )
    module.load_state_dict(saved, strict=False)


def _read(file: Path) -> dict[str, torch.Tensor]:
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
    generation = cast("GenerationConfig", plain.generation_config)
    try:
        generation.validate(strict=True)
    except ValueError:
        # Some published models set a temperature without this, and transformers refuses to save it.
        generation.do_sample = True
    try:
        plain.to(dtype).save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    except SafetensorError as error:
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
