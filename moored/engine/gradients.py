"""Keeps the gradients of terms and groups until their inner products are taken.

Small models: all numbers, in main memory. Large ones: a random projection of each gradient, weight
by weight, whose inner products are those of the gradients up to a known error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from moored.engine.base import TermGradients
from moored.engine.passes import trunk_of
from moored.errors import MooredError

MAX_NUMBERS = 1 << 28
"""Most numbers to store, 1 GiB; above that gradients are projected."""
DIMENSIONS = 1 << 14
BLOCK = 1 << 16
"""Columns of stored gradients that are multiplied at a time, in float64."""
CHUNK = 1 << 24
"""Numbers of a weight that are projected at a time."""
SEED = 2026
"""The projection is the same in every measurement, and not of the run's randomness."""

Gradients = Sequence[torch.Tensor | None]


class KeptGradients(Protocol):
    """Sums of gradients, one for each term and group."""

    @property
    def dimensions(self) -> int | None:
        """Of a projection; None where gradients are kept as they are."""
        ...

    def add(self, term: int, group: int, gradients: Gradients) -> None:
        """Add the gradients of a micro-batch; None for a weight that took no part."""
        ...

    def products(self) -> np.ndarray:
        """(T, P, T, P) inner products."""
        ...


def chosen_weights(model: nn.Module, params: str) -> list[nn.Parameter]:
    """The trained weights that `params` names: `all`, `lora`, or those of the `last-block`."""
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if params == "lora":
        named = {name: weight for name, weight in named.items() if "lora_" in name}
        if not named:
            raise MooredError("this model has no LoRA weights; choose params all or last-block")
    if params == "last-block":
        own = {id(weight) for weight in _last_block(model).parameters()}
        named = {name: weight for name, weight in named.items() if id(weight) in own}
    return list(named.values())


def _last_block(model: nn.Module) -> nn.Module:
    stacks = [m for m in trunk_of(model).modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not stacks:
        raise MooredError("this model has no stack of blocks; choose params all")
    return stacks[0][len(stacks[0]) - 1]


def term_products(
    terms: Sequence[str],
    weights: Sequence[nn.Parameter],
    found: Iterable[Iterable[Iterable[Gradients]]],
    num_groups: int,
    *,
    max_numbers: int,
) -> TermGradients:
    """Add up gradients (of each term, of each micro-batch, of each group) and multiply them."""
    kept = keep_gradients(weights, len(terms), num_groups, max_numbers=max_numbers)
    for group, batches in enumerate(found):
        for batch in batches:
            for term, gradients in enumerate(batch):
                kept.add(term, group, gradients)
    return TermGradients(
        terms=tuple(terms),
        products_TPTP=kept.products(),
        num_parameters=sum(weight.numel() for weight in weights),
        dimensions=kept.dimensions,
    )


def keep_gradients(
    weights: Sequence[nn.Parameter], num_terms: int, num_groups: int, *, max_numbers: int
) -> KeptGradients:
    """Exact where memory allows, else projected."""
    size = sum(weight.numel() for weight in weights)
    if size * num_terms * num_groups <= max_numbers:
        return StoredGradients(weights, num_terms, num_groups)
    return ProjectedGradients(weights, num_terms, num_groups)


class StoredGradients:
    """Every number."""

    dimensions = None

    def __init__(self, weights: Sequence[nn.Parameter], num_terms: int, num_groups: int) -> None:
        self._sizes = [weight.numel() for weight in weights]
        self._sums_TPD = np.zeros((num_terms, num_groups, sum(self._sizes)), dtype=np.float32)

    def add(self, term: int, group: int, gradients: Gradients) -> None:
        start = 0
        for size, gradient in zip(self._sizes, gradients, strict=True):
            if gradient is not None:
                flat = gradient.detach().reshape(-1).float().cpu().numpy()
                self._sums_TPD[term, group, start : start + size] += flat
            start += size

    def products(self) -> np.ndarray:
        num_terms, num_groups, size = self._sums_TPD.shape
        rows = self._sums_TPD.reshape(num_terms * num_groups, size)
        total = np.zeros((len(rows), len(rows)))
        for start in range(0, size, BLOCK):
            block = rows[:, start : start + BLOCK].astype(np.float64)
            total += block @ block.T
        return total.reshape(num_terms, num_groups, num_terms, num_groups)


class ProjectedGradients:
    """A count sketch: each number of a gradient is added, with a random sign, to a random one of
    `dimensions` sums. Projections of sums are sums of projections, norms are kept up to
    `relative_error`.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        num_terms: int,
        num_groups: int,
        *,
        dimensions: int = DIMENSIONS,
        seed: int = SEED,
    ) -> None:
        self.dimensions = dimensions
        self._seed = seed
        self._num_weights = len(weights)
        device = weights[0].device
        # MPS has no float64; elsewhere it keeps rounding out of the sums.
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(num_terms, num_groups, dimensions, dtype=kind, device=device)

    def add(self, term: int, group: int, gradients: Gradients) -> None:
        assert len(gradients) == self._num_weights
        sums = self._sums[term, group]
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            flat = gradient.detach().reshape(-1)
            for part, places, signs in self._hashes(index, len(flat), flat.device):
                sums.index_add_(0, places, flat[part].to(sums.dtype) * signs)

    def _hashes(
        self, index: int, size: int, device: torch.device
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Where each number of a weight goes and with which sign: the same at every call."""
        generator = torch.Generator(device).manual_seed(self._seed + index)
        for start in range(0, size, CHUNK):
            count = min(CHUNK, size - start)
            drawn = torch.randint(2 * self.dimensions, (count,), generator=generator, device=device)
            yield slice(start, start + count), drawn >> 1, (drawn & 1) * 2 - 1

    def products(self) -> np.ndarray:
        num_terms, num_groups, dimensions = self._sums.shape
        rows = self._sums.reshape(-1, dimensions).cpu().numpy().astype(np.float64)
        return (rows @ rows.T).reshape(num_terms, num_groups, num_terms, num_groups)
