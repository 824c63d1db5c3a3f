"""TRL's `GRPOTrainer` with SNR-aware filtering and collapse metrics on its own model.

`FilteredGRPOTrainer` takes the arguments of `GRPOTrainer` and a few of its own. Groups are selected
over the batch of all processes; rows of dropped groups stay in the batch with an empty loss mask,
so that their policy, KL and entropy terms vanish, and the loss is renormalised to the kept rows.

Shape legend: W processes, S micro-batches of one generation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from moored.algo import loss_scale as loss_scale_of
from moored.algo import select_groups
from moored.algo.filters import SelectOptions
from moored.algo.groups import check_reward_score
from moored.names import check_name
from moored.types import Selection

try:
    import torch
    from transformers import TrainerCallback

    from moored.integrations.trl_collapse import AlarmCallback, CollapseOptions, WatchedGRPOTrainer
except ImportError as error:
    raise ImportError(
        f"moored.integrations.trl needs TRL ({error}); run: pip install 'moored[trl]'"
    ) from error

__all__ = ["AlarmCallback", "CollapseOptions", "FilteredGRPOTrainer", "LossFactors", "loss_factors"]

logger = logging.getLogger(__name__)

ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that divide by the rows of a micro-batch."""
MICRO_BATCH_MEANS = ("bnpo",)
"""Losses that divide by the loss tokens of a micro-batch."""
GENERATION_MEANS = ("dapo", "cispo", "vespo")
"""Losses that divide by `num_items_in_batch`, the loss tokens of all processes."""


@dataclass(frozen=True, slots=True)
class LossFactors:
    """What gradients are multiplied by, so that the loss is a mean over the kept rows."""

    policy: float = 1.0
    """Of the policy and KL terms."""
    entropy: float = 1.0


def loss_factors(loss_type: str, kept_rows_WS: np.ndarray, rows: int) -> LossFactors:
    """Factors for one generation; `rows` is the size of a micro-batch.

    TRL averages over micro-batches and processes with equal weights, empty ones included. A mean
    over rows is therefore off by rows / kept rows. A mean over the tokens of a micro-batch is off
    by micro-batches / micro-batches that kept a row; so is the entropy bonus of every loss type.
    Token counts over the generation are right as soon as `num_items_in_batch` is.
    """
    num_kept, num_used = int(kept_rows_WS.sum()), int(np.count_nonzero(kept_rows_WS))
    if num_kept == 0:
        return LossFactors()
    by_row, by_batch = rows * kept_rows_WS.size / num_kept, kept_rows_WS.size / num_used
    if loss_type in ROW_MEANS:
        return LossFactors(by_row, by_batch)
    return LossFactors(by_batch if loss_type in MICRO_BATCH_MEANS else 1.0, by_batch)


class FilteredGRPOTrainer(WatchedGRPOTrainer):
    """`GRPOTrainer` that trains on the groups whose rewards differ, and watches for collapse.

    `group_filter` are keyword arguments of `moored.algo.select_groups`; `{"rule": "none"}` keeps
    every group. It works as a mix-in too: `class Mine(FilteredGRPOTrainer, TheirGRPOTrainer)`.
    """

    def __init__(
        self,
        *args: Any,
        group_filter: SelectOptions | None = None,
        loss_scale: str = "none",
        max_empty_steps: int = 5,
        **kwargs: Any,
    ) -> None:
        self.group_filter: SelectOptions = group_filter or {}
        self.filter_loss_scale = loss_scale
        _check_filter(self.group_filter, loss_scale)
        super().__init__(*args, **kwargs)
        known = (*ROW_MEANS, *MICRO_BATCH_MEANS, *GENERATION_MEANS)
        check_name("loss_type for filtering", self.loss_type, known)
        self._rewards: Any = None
        self._selection: Selection | None = None
        self._factors = LossFactors()
        self._kept_rows_S = np.ones(1, dtype=np.int64)
        self._window_rows = 0
        self.add_callback(_EmptySteps(self, max_empty_steps))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Raw rewards: `normalize_then_sum` turns them into z-scores, which all have variance 1.
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        selection = self._selection = self._select()
        is_kept = selection.group_mask.repeat(len(self._rewards) // selection.num_groups)
        num_rows = len(batch["advantages"])
        start = self.accelerator.process_index * num_rows
        num_generated = int(batch["num_items_in_batch"])
        if not is_kept.all():
            self._mask(batch, torch.from_numpy(is_kept[start : start + num_rows]))
        num_trained = int(batch["num_items_in_batch"])
        self._record(
            selection.metrics()
            | {"tokens/trained": num_trained, "tokens/discarded": num_generated - num_trained}
        )
        return batch

    def _select(self) -> Selection:
        """Rank the groups of all processes by their weighted raw rewards."""
        rewards = self._rewards
        weights = self.reward_weights.to(rewards.device)
        summed = (rewards * weights).nansum(dim=1)
        summed[rewards.isnan().all(dim=1)] = torch.nan
        grouped = summed.view(-1, self.num_generations).float().cpu().numpy()
        return select_groups(grouped, **self.group_filter)

    def _mask(self, batch: dict[str, Any], is_kept: torch.Tensor) -> None:
        """Empty the loss mask of dropped rows, and count loss tokens again."""
        is_kept = is_kept.to(batch["completion_mask"].device)
        mask = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
        batch["tool_mask"] = mask * is_kept.unsqueeze(1)
        num_tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
        batch["num_items_in_batch"] = self.accelerator.gather(num_tokens).sum()
        batch["is_kept"] = is_kept

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        batch = super()._prepare_inputs(generation_batch)
        if self._selection is not None:  # a new generation, by now shuffled and split
            self._renormalise(self._selection)
            self._selection = None
        return batch

    def _renormalise(self, selection: Selection) -> None:
        """Find the loss factors from how many kept rows each micro-batch holds."""
        parts: Any = self._buffered_inputs
        rows = len(parts[0]["advantages"])
        scale = loss_scale_of(selection.kept_fraction, self.filter_loss_scale)
        if len(selection.kept) == selection.num_groups:
            self._kept_rows_S = np.full(len(parts), rows)
            self._factors = LossFactors()
            return
        counts = torch.stack([part["is_kept"].sum() for part in parts])
        kept_rows_WS = self.accelerator.gather(counts).view(-1, len(parts)).cpu().numpy()
        self._kept_rows_S = kept_rows_WS.sum(axis=0)
        factors = loss_factors(self.loss_type, kept_rows_WS, rows)
        self._factors = LossFactors(factors.policy * scale, factors.entropy * scale)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # Policy and KL reach the weights through log-probs, the bonus through entropies: scaling
        # these gradients leaves every logged number as TRL computes it.
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        factors = (self._factors.policy, self._factors.entropy)
        for tensor, factor in zip(found[:2], factors, strict=True):
            if tensor is not None and tensor.requires_grad and factor != 1.0:
                tensor.register_hook(lambda grad, factor=factor: grad * factor)
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._window_rows += int(self._kept_rows_S[(self._step - 1) % len(self._kept_rows_S)])
        return loss


class _EmptySteps(TrainerCallback):
    """Skips updates that have no kept row, and ends training after too many in a row."""

    def __init__(self, trainer: FilteredGRPOTrainer, max_in_a_row: int) -> None:
        self._trainer = trainer
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_empty = self._trainer._window_rows == 0
        self._trainer._window_rows = 0
        self._trainer._record({"update/is_empty": is_empty})
        self._num_in_a_row = self._num_in_a_row + 1 if is_empty else 0
        if is_empty:
            # Zero gradients would still let momentum and weight decay move the weights.
            self._trainer.model.zero_grad(set_to_none=True)
        if self._num_in_a_row < self._max_in_a_row:
            return
        control.should_training_stop = True
        if state.is_world_process_zero:
            logger.warning(
                "training stops: %d updates in a row had no group with reward variance to train on",
                self._num_in_a_row,
            )


def _check_filter(options: SelectOptions, loss_scale: str) -> None:
    """Raise before a model is loaded."""
    check_reward_score(options.get("score", "variance"), "GRPOTrainer")
    select_groups([[0.0, 1.0]], **options)
    loss_scale_of(1.0, loss_scale)
