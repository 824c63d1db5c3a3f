"""Weights for modules that were sharded on the meta device: every rank gets its part of each.

Ranks read their parts from safetensors files. What cannot be read in parts is loaded by rank 0 into
main memory and scattered tensor by tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moored.errors import MooredError
from moored.models.load import load_model
from moored.models.outline import Place, read_outline


class Weights(Protocol):
    """What the weights of a model are read from."""

    def fill(self, own: Mapping[str, DTensor]) -> None:
        """Set all of them, by the model's names; called on every rank at once."""
        ...


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weights in safetensors files."""

    places: Mapping[str, Place]

    def fill(self, own: Mapping[str, DTensor]) -> None:
        from safetensors import safe_open

        by_file: dict[Path, dict[str, DTensor]] = {}
        for name, weight in own.items():
            place = self.places[name]
            by_file.setdefault(place.file, {})[place.name] = weight
        # Not torch's HuggingFaceStorageReader, which takes every such file of a folder.
        for file, weights in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name, weight in weights.items():
                    part = opened.get_slice(name)[own_rows(weight)]
                    weight.to_local().copy_(part)


@dataclass(frozen=True, slots=True)
class ScatteredWeights:
    """Weights that rank 0 has, in main memory; None on other ranks."""

    whole: Mapping[str, torch.Tensor] | None

    def fill(self, own: Mapping[str, DTensor]) -> None:
        for name, weight in own.items():
            local = weight.to_local()
            if self.whole is not None:
                tensor = self.whole[name].to(local.device, local.dtype)
            else:
                tensor = local.new_empty(weight.shape)
            local.copy_(distribute_tensor(tensor, weight.device_mesh, weight.placements).to_local())


@dataclass(frozen=True, slots=True)
class EmptyModel:
    """A model on the meta device, and its weights."""

    model: Any
    weights: Weights


def load_empty(name: str, group: dist.ProcessGroup, *, exact: bool) -> EmptyModel:
    """The model of a name, for the ranks of a group; `exact` as in `load_model`."""
    outline = read_outline(name, exact=exact)
    if outline is not None:
        return EmptyModel(outline.model, FileWeights(outline.places))
    found: list[Any] = [None]
    whole = None
    if dist.get_rank(group) == 0:
        try:
            model = load_model(name, torch.device("cpu"), exact=exact).model
            whole = dict(model.named_parameters())
            found = [on_meta(model)]
        except MooredError as error:
            # All ranks say it, or the others would wait.
            found = [error]
    dist.broadcast_object_list(found, src=0, group=group)
    if isinstance(found[0], MooredError):
        raise found[0]
    return EmptyModel(found[0], ScatteredWeights(whole))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy with the buffers of a model and without its weights."""
    empty: dict[int, object] = {
        id(weight): nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, empty)


def own_rows(weight: DTensor) -> slice:
    """Those of the whole weight that this rank holds."""
    assert weight.placements == (Shard(0),)
    mesh = weight.device_mesh
    most = -(-weight.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * most, weight.shape[0])
    return slice(start, start + weight.to_local().shape[0])
