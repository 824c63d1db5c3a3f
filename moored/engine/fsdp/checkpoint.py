"""Checkpoints in shards: every rank writes its own, and any number of ranks reads them.

Written and read by torch.distributed.checkpoint. Names are those of the whole module, so a
checkpoint does not depend on the number of ranks that wrote it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moored.engine.fsdp.trained import shard_like
from moored.engine.local.files import SHARDS, write_version
from moored.engine.local.state import Trained, check_shapes, read_tensors
from moored.errors import MooredError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for each weight, in its shape; and the number of steps."""
STEP = "step"


def save_shards(
    folder: Path, trained: Sequence[Trained], version: int, group: dist.ProcessGroup | None = None
) -> None:
    """Write what the ranks of a group hold of trained weights and optimiser states."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for each in trained:
        weights = each.trained_weights()
        tensors |= {_weight_key(each.name, name): tensor for name, tensor in weights.items()}
        for index, entry in each.optimizer_state().items():
            for name in (*MOMENTS, STEP):
                tensors[_state_key(each.name, index, name)] = torch.as_tensor(entry[name])
    save(tensors, checkpoint_id=folder / SHARDS, process_group=group)
    if group is None or dist.get_rank(group) == 0:
        _check_written(folder)
        write_version(folder, version)


def _check_written(folder: Path) -> None:
    """Raise where this rank does not see what the others wrote."""
    try:
        _read_metadata(folder / SHARDS)
    except MooredError as error:
        raise MooredError(
            f"the checkpoint {str(folder)!r} is not whole where rank 0 reads it ({error}); all "
            f"nodes have to see the run directory under the same path, on a disk that they share"
        ) from error


def load_shards(
    folder: Path, trained: Sequence[Trained], group: dist.ProcessGroup | None = None
) -> None:
    """Bring modules and optimisers to what a checkpoint holds, in this process or in a group."""
    found = _read_metadata(folder / SHARDS)
    tensors: dict[str, torch.Tensor] = {}
    states: list[dict[int, dict[str, torch.Tensor]]] = []
    for each in trained:
        tensors |= _checked(folder, found, each.name, each.trained_weights())
        states.append(_room_for_state(each, found))
        for index, entry in states[-1].items():
            tensors |= {_state_key(each.name, index, name): entry[name] for name in entry}
    _fill(folder, tensors, group)
    for each, state in zip(trained, states, strict=True):
        each.take_over(state)


def load_sharded_weights(
    folder: Path, name: str, module: nn.Module, group: dist.ProcessGroup | None = None
) -> None:
    """Bring the trained weights of a module alone to what a checkpoint holds."""
    own, found = _trained_weights(module), _read_metadata(folder / SHARDS)
    _fill(folder, _checked(folder, found, name, own), group)


def load_whole(folder: Path, trained: Sequence[Trained]) -> None:
    """Bring sharded modules and optimisers to what one process wrote."""
    for each in trained:
        load_whole_weights(folder, each.name, each.module)
        state: dict[int, dict[str, torch.Tensor]] = {}
        flat = read_tensors(folder / f"{each.name}_optimizer.safetensors")
        for key, tensor in flat.items():
            index, _, name = key.partition(".")
            own = shard_like(each.weights[int(index)], tensor) if tensor.ndim else tensor
            state.setdefault(int(index), {})[name] = own
        each.take_over(state)


def load_whole_weights(folder: Path, name: str, module: nn.Module) -> None:
    """Bring the trained weights of a sharded module to what one process wrote."""
    file = folder / f"{name}.safetensors"
    saved, own = read_tensors(file), _trained_weights(module)
    shapes = {name: tensor.shape for name, tensor in saved.items() if name in own}
    check_shapes(file, own, shapes)
    for key, weight in own.items():
        weight.copy_(shard_like(weight, saved[key]))


def _trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    named = module.named_parameters()
    return {name: weight.detach() for name, weight in named if weight.requires_grad}


def _fill(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings(), _torn(folder):
        warnings.simplefilter("ignore", UserWarning)  # that one process reads it
        load(tensors, checkpoint_id=folder / SHARDS, process_group=group)


def _checked(
    folder: Path, found: Metadata, module: str, wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weights by their keys; raises when those that were saved are of another model."""
    start = _weight_key(module, "")
    given = {
        key.removeprefix(start): tuple(getattr(entry, "size", ()))
        for key, entry in found.state_dict_metadata.items()
        if key.startswith(start)
    }
    check_shapes(folder / SHARDS, wanted, given)
    return {start + name: tensor for name, tensor in wanted.items()}


def _weight_key(module: str, name: str) -> str:
    return f"{module}/weights/{name}"


def _state_key(module: str, index: int, name: str) -> str:
    return f"{module}/optimizer/{index}/{name}"


def _room_for_state(trained: Trained, found: Metadata) -> dict[int, dict[str, torch.Tensor]]:
    """Room for the optimiser state that was saved; before the first update there is none."""
    state = {}
    for index in range(len(trained.weights)):
        if _state_key(trained.name, index, STEP) in found.state_dict_metadata:
            state[index] = {**trained.room_for_state(index, MOMENTS), STEP: torch.zeros(())}
    return state


def _read_metadata(folder: Path) -> Metadata:
    """The table of contents; raises when a file is missing or shorter than it says."""
    with _torn(folder.parent):
        found = FileSystemReader(folder).read_metadata()
    for stored in (found.storage_data or {}).values():
        file = folder / stored.relative_path
        size = file.stat().st_size if file.is_file() else 0
        if size < stored.offset + stored.length:
            raise _damage(folder.parent, f"{file.name} ends after {size} bytes")
    return found


@contextmanager
def _torn(folder: Path) -> Iterator[None]:
    """One sentence for what torch raises while it reads a damaged checkpoint."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, UnpicklingError, KeyError, CheckpointException) as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        raise _damage(folder, lines[0]) from e


def _damage(folder: Path, why: str) -> MooredError:
    return MooredError(
        f"{str(folder / SHARDS)!r} is damaged or missing ({why}); delete the folder "
        f"{folder.name!r}, then the checkpoint before it is used"
    )
