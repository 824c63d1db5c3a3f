"""Plug-in for verl's V1 trainer, loaded by `VERL_USE_EXTERNAL_MODULES`.

Registers the advantage estimator `moored_soft_grpo` and the trainer mode `moored_sync`: verl's
synchronous trainer, which masks the groups that the filter drops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.algo import select_groups
from moored.algo.filters import SelectOptions
from moored.integrations.verl import filter_options, soft_grpo
from moored.types import Selection

try:
    import torch
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
        register_adv_est,
    )
    from verl.trainer.ppo.v1 import (  # pyright: ignore[reportMissingImports]
        PPOTrainerSync,
        register_trainer,
    )
except ImportError as error:
    raise ImportError(
        f"moored.integrations.verl_trainer needs verl with its V1 trainer ({error}); "
        f"run: pip install 'verl[verl-core]>=0.9.1'"
    ) from error

register_adv_est("moored_soft_grpo")(soft_grpo)

MASKS = ("response_mask", "loss_mask")
"""The losses are summed under the first; the engines count loss tokens by the second."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSelection:
    """Which rows of a batch an update uses."""

    selection: Selection
    is_used: np.ndarray
    """(rows,) False for rows of dropped groups; rows that only fill up the batch stay as is."""


def select_keys(
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    uids: Sequence[str],
    rewards: np.ndarray,
    options: SelectOptions,
) -> RowSelection:
    """Select groups of a batch whose keys are `{uid}_{session}_{output}`.

    A session is one trajectory, which may be stored in several outputs of equal reward: it counts
    once. Rows that verl added to fill up the batch take no part.
    """
    is_real = np.array([not tag.get("is_padding", False) for tag in tags])
    sessions: dict[str, int] = {}
    for row in np.flatnonzero(is_real).tolist():
        sessions.setdefault(keys[row].rsplit("_", 1)[0], row)
    rows = list(sessions.values())
    selection = select_groups(rewards[rows], [uids[row] for row in rows], **options)
    kept = set(selection.labels[selection.kept].tolist())
    is_used = np.array([uid in kept for uid in uids]) | ~is_real
    return RowSelection(selection, is_used)


@register_trainer("moored_sync")
class FilteredPPOTrainer(PPOTrainerSync):
    """`PPOTrainerSync` that trains on the groups whose rewards differ.

    Options of `select_groups` stand under `algorithm.moored`.
    """

    def __init__(self, config: Any) -> None:
        # verl takes every mode of another name for an asynchronous one.
        config.trainer.v1.trainer_mode = "sync"
        self.group_filter = filter_options(config.algorithm)
        self._is_empty = False
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        result = super()._compute_advantage(batch, metrics)
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = tq.kv_batch_get(**place, select_fields=["uid", "rm_scores", *MASKS])
        rewards = np.array([float(row.sum()) for row in data["rm_scores"].unbind()], np.float32)
        chosen = select_keys(
            batch.keys, batch.tags, data["uid"].tolist(), rewards, self.group_filter
        )
        num_tokens = np.array([int(row.sum()) for row in data["response_mask"].unbind()])
        is_chosen = chosen.is_used & bool(len(chosen.selection.kept))
        num_trained = int(num_tokens[is_chosen].sum())
        # Kept groups may have no loss token, and verl cannot average over nothing: an update
        # without tokens is left out instead.
        self._is_empty = num_trained == 0
        if not self._is_empty:
            masks = {name: _masked(data[name], chosen.is_used) for name in MASKS}
            tq.kv_batch_put(**place, fields=TensorDict(masks, batch_size=len(batch)))
        metrics |= chosen.selection.metrics()
        metrics["tokens/trained"] = num_trained
        metrics["tokens/discarded"] = int(num_tokens.sum()) - num_trained
        metrics["update/is_empty"] = float(self._is_empty)
        return result

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch if self._is_empty else super()._update_critic(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch if self._is_empty else super()._update_actor(batch, metrics)


def _masked(mask: torch.Tensor, is_used: np.ndarray) -> torch.Tensor:
    """A jagged mask whose rows are zero where they are not used."""
    rows = [row * int(used) for row, used in zip(mask.unbind(), is_used, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
