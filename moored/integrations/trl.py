"""TRL's `GRPOTrainer` with SNR-aware filtering and collapse metrics on its own model.

`FilteredGRPOTrainer` takes the arguments of `GRPOTrainer` and a few of its own. Groups are selected
over the batch of all processes; rows of dropped groups stay in the batch with an empty loss mask,
so that their policy, KL and entropy terms vanish, and the loss is renormalised to the kept rows.
Micro-batches and updates without a loss token stay out of TRL's averages.

Shape legend: W processes, S micro-batches of one generation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moored.algo import loss_scale as loss_scale_of
from moored.algo import select_groups
from moored.algo.filters import SelectOptions
from moored.algo.groups import check_reward_score
from moored.integrations.trl_loss import (
    LOSS_MEANS,
    LossFactors,
    check_loss_mean,
    loss_factors,
    own_loss_mean,
)
from moored.names import check_name
from moored.types import Selection

try:
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from moored.integrations.trl_collapse import (
        AlarmCallback,
        CollapseOptions,
        WatchedGRPOTrainer,
        shows_parameters_of,
    )
    from moored.integrations.trl_empty import EmptyUpdates
except ImportError as error:
    raise ImportError(
        f"moored.integrations.trl needs TRL ({error}); run: pip install 'moored[trl]'"
    ) from error

__all__ = ["AlarmCallback", "CollapseOptions", "FilteredGRPOTrainer", "LossFactors", "loss_factors"]

NOT_TOKEN_MEANS = ("policy_loss", "entropy_coef", "aux_loss")
"""What a loss logs that has a value without loss tokens."""


class FilteredGRPOTrainer(WatchedGRPOTrainer):
    """`GRPOTrainer` that trains on the groups whose rewards differ, and watches for collapse.

    `group_filter` are keyword arguments of `moored.algo.select_groups`; `{"rule": "none"}` keeps
    every group and trains as `GRPOTrainer` does. `loss_scale` multiplies the loss by the kept
    fraction (`none`, `linear`, `sqrt`). `loss_mean` says what the loss of a subclass that overrides
    it is divided by (`rows`, `micro_batch`, `generation`). After `max_empty_generations` in a row
    without anything to train on it warns, and with `stop_when_empty` ends training.
    It works as a mix-in too: `class Mine(FilteredGRPOTrainer, TheirGRPOTrainer)`.
    """

    @shows_parameters_of(WatchedGRPOTrainer.__init__)
    def __init__(
        self,
        *args: Any,
        group_filter: SelectOptions | None = None,
        loss_scale: str = "none",
        loss_mean: str | None = None,
        max_empty_generations: int = 5,
        stop_when_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        self.group_filter: SelectOptions = group_filter or {}
        self.filter_loss_scale = loss_scale
        self._filters = self.group_filter.get("rule") != "none"
        _check_filter(self.group_filter, loss_scale)
        check_loss_mean(loss_mean)
        if loss_mean is None and self._filters:
            loss_mean = own_loss_mean(type(self), GRPOTrainer, FilteredGRPOTrainer)
        super().__init__(*args, **kwargs)
        if loss_mean is None and self._filters:
            check_name("loss_type for filtering", self.loss_type, tuple(LOSS_MEANS))
        self._loss_mean = loss_mean or LOSS_MEANS.get(self.loss_type, "generation")
        self._rewards: Any = None
        self._selection: Selection | None = None
        self._factors = LossFactors()
        self._loss_tokens_S = np.ones(1, dtype=np.int64)
        self._empty = EmptyUpdates(
            self, max_in_a_row=max_empty_generations, stop=stop_when_empty, skip=self._filters
        )
        self.add_callback(self._empty)

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
        self._empty.count_generation(is_empty=num_trained == 0)
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
        batch["num_items_in_batch"] = self.accelerator.gather(_num_loss_tokens(batch)).sum()
        batch["is_kept"] = is_kept

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        batch = super()._prepare_inputs(generation_batch)
        if self._selection is not None:  # a new generation, by now shuffled and split
            self._renormalise(self._selection)
            self._selection = None
        return batch

    def _renormalise(self, selection: Selection) -> None:
        """Find loss tokens and loss factors from what each micro-batch holds."""
        parts: Any = self._buffered_inputs
        rows = len(parts[0]["advantages"])
        counts = torch.stack(
            [torch.stack([_num_kept_rows(part), _num_loss_tokens(part)]) for part in parts]
        )
        counts_WS2 = self.accelerator.gather(counts).view(-1, len(parts), 2).cpu().numpy()
        self._loss_tokens_S = counts_WS2[:, :, 1].sum(axis=0)
        self._factors = LossFactors()
        if len(selection.kept) < selection.num_groups:
            scale = loss_scale_of(selection.kept_fraction, self.filter_loss_scale)
            factors = loss_factors(self._loss_mean, counts_WS2[:, :, 0], rows)
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

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        num_tokens = int(self._loss_tokens_S[self._step % len(self._loss_tokens_S)])
        self._empty.num_tokens += num_tokens
        metrics = self._metrics["train"]
        num_logged = {name: len(values) for name, values in metrics.items()}
        controller = (self.entropy_coef, self._last_world_entropy)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if num_tokens == 0 and self._filters:
            _forget(metrics, num_logged)
            if self._empty.num_tokens == 0:
                self._restore_controller(*controller)
        return loss

    def _restore_controller(self, entropy_coef: float, world_entropy: float) -> None:
        """TRL's adaptive controller takes an update without tokens for one of entropy 0."""
        self.entropy_coef, self._last_world_entropy = entropy_coef, world_entropy
        logged = self._metrics["train"].get("entropy_coef")
        if logged and self.accelerator.sync_gradients:
            logged[-1] = entropy_coef

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"empty_generations": self._empty.num_in_a_row}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self._empty.num_in_a_row = state["empty_generations"]


def _num_loss_tokens(batch: dict[str, Any]) -> torch.Tensor:
    mask = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).sum()


def _num_kept_rows(batch: dict[str, Any]) -> torch.Tensor:
    advantages = batch["advantages"]
    is_kept = batch.get("is_kept")
    if is_kept is None:
        return torch.tensor(len(advantages), device=advantages.device)
    return is_kept.sum()


def _forget(metrics: dict[str, list[float]], num_logged: dict[str, int]) -> None:
    """Take back the means over loss tokens that were logged since: there were no tokens."""
    for name in [name for name in metrics if name not in NOT_TOKEN_MEANS]:
        del metrics[name][num_logged.get(name, 0) :]
        if not metrics[name]:
            del metrics[name]


def _check_filter(options: SelectOptions, loss_scale: str) -> None:
    """Raise before a model is loaded."""
    check_reward_score(options.get("score", "variance"), "GRPOTrainer")
    select_groups([[0.0, 1.0]], **options)
    loss_scale_of(1.0, loss_scale)
