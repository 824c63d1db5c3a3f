"""What a TRL trainer divides its loss by, and the factors that make it a mean over kept rows.

Numpy only. Shape legend: W processes, S micro-batches of one generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moored.errors import MooredError
from moored.names import check_name

LOSS_MEANS: Mapping[str, str] = {
    "grpo": "rows",
    "sapo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "bnpo": "micro_batch",
    "dapo": "generation",
    "cispo": "generation",
    "vespo": "generation",
}
"""`loss_type` of TRL's own loss -> what it is divided by: the rows of a micro-batch, the loss
tokens of a micro-batch, or `num_items_in_batch`, the loss tokens of all processes."""

KNOWN_LOSSES: Mapping[str, str] = {"trl.experimental.gmpo.gmpo_trainer.GMPOTrainer": "rows"}
"""Trainers with a loss of their own, whose `loss_type` says nothing -> what it is divided by."""


@dataclass(frozen=True, slots=True)
class LossFactors:
    """What gradients are multiplied by, so that the loss is a mean over the kept rows."""

    policy: float = 1.0
    """Of the policy and KL terms."""
    entropy: float = 1.0


def loss_factors(loss_mean: str, kept_rows_WS: np.ndarray, rows: int) -> LossFactors:
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
    return LossFactors({"rows": by_row, "micro_batch": by_batch}.get(loss_mean, 1.0), by_batch)


def own_loss_mean(trainer: type, base: type, wrapper: type) -> str | None:
    """What `trainer` divides its loss by where it overrides that of `base`; None where it does not.

    `wrapper` calls on to the next class and counts as no override.
    """
    for name in ("compute_loss", "_compute_loss"):
        owner = next(c for c in trainer.__mro__ if name in vars(c) and c is not wrapper)
        if owner is base:
            continue
        known = KNOWN_LOSSES.get(f"{owner.__module__}.{owner.__qualname__}")
        if known is None:
            raise MooredError(
                f"{owner.__name__} overrides {name}, so `loss_type` does not tell what its loss is "
                f"divided by, and filtered gradients cannot be scaled; pass loss_mean='rows' (a "
                f"mean over the rows of a micro-batch), 'micro_batch' (over its loss tokens) or "
                f"'generation' (over num_items_in_batch)"
            )
        return known
    return None


def check_loss_mean(loss_mean: str | None) -> None:
    if loss_mean is not None:
        check_name("loss_mean", loss_mean, tuple(dict.fromkeys(LOSS_MEANS.values())))
