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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moored.engine.local.state import Trained, write_version
from moored.errors import MooredError

SHARDS = "shards"
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
        write_version(folder, version)


def load_shards(
    folder: Path,
    trained: Sequence[Trained],
    weights: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Bring modules and optimisers, or `weights` by module and name, to what a checkpoint holds."""
    found = _read_metadata(folder / SHARDS)
    named = weights or {each.name: each.trained_weights() for each in trained}
    tensors = {
        _weight_key(module, name): tensor
        for module, tensors in named.items()
        for name, tensor in tensors.items()
    }
    _check_fits(folder, found, tensors)
    states = {each.name: _empty_state(each, found) for each in trained}
    for module, state in states.items():
        for index, entry in state.items():
            tensors |= {_state_key(module, index, name): entry[name] for name in entry}
    with warnings.catch_warnings(), _torn(folder):
        warnings.simplefilter("ignore", UserWarning)  # that one process reads it
        load(tensors, checkpoint_id=folder / SHARDS, process_group=group)
    for each in trained:
        each.take_over(states[each.name])


def has_shards(folder: Path) -> bool:
    return (folder / SHARDS).is_dir()


def _weight_key(module: str, name: str) -> str:
    return f"{module}/weights/{name}"


def _state_key(module: str, index: int, name: str) -> str:
    return f"{module}/optimizer/{index}/{name}"


def _empty_state(trained: Trained, found: Metadata) -> dict[int, dict[str, torch.Tensor]]:
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


def _check_fits(folder: Path, found: Metadata, wanted: Mapping[str, torch.Tensor]) -> None:
    saved = {
        key: tuple(getattr(entry, "size", ()))
        for key, entry in found.state_dict_metadata.items()
        if "/weights/" in key and key.partition("/")[0] in {k.partition("/")[0] for k in wanted}
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in wanted.items()}
    odd = sorted(key for key in shapes.keys() | saved if shapes.get(key) != saved.get(key))
    if odd:
        raise MooredError(
            f"{str(folder / SHARDS)!r} does not fit the model: {len(odd)} weights differ in name "
            f"or shape, {odd[0].rpartition('/')[2]!r} among them; give the model and lora_rank "
            f"that the run began with"
        )


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
