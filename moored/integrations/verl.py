"""SNR-aware filtering on verl's `DataProto`: select rows, mask rows, or weight groups softly.

Batches and tensors come in as verl's own objects, so neither verl nor torch is imported here.
`moored.integrations.verl_trainer` plugs these functions into verl's trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Unpack

import numpy as np

from moored.algo import dr_grpo, grpo, select_groups
from moored.algo.filters import SelectOptions
from moored.algo.groups import check_reward_score
from moored.errors import MooredError
from moored.names import check_name
from moored.types import Selection

CONFIG_KEY = "moored"
"""Options of `select_groups` stand under `algorithm.moored` in verl's configuration."""
PADDING_UID = "padding"
RAW_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")
"""Where a batch may hold rewards by token; the last has the KL penalty taken off."""


class DataProto(Protocol):
    """What is used of `verl.DataProto`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    batch: Any
    """TensorDict of (rows, …) tensors."""
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]

    def __len__(self) -> int: ...

    def select_idxs(self, idxs: Any) -> DataProto: ...


class AlgorithmConfig(Protocol):
    """What is used of verl's `algorithm` configuration."""

    def get(self, key: str, default: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FilteredBatch:
    """A batch to train on, and how it was selected."""

    batch: DataProto
    selection: Selection
    metrics: Mapping[str, float]
    """For verl's logger."""
    num_padding: int = 0
    """Rows at the end of `batch` that only fill it up: empty loss mask, a group of their own."""

    @property
    def is_empty(self) -> bool:
        """No loss token was kept: skip the update."""
        return bool(self.metrics["update/is_empty"])


def select_rows(
    batch: DataProto,
    *,
    divisor: int = 1,
    metric: str | None = None,
    **options: Unpack[SelectOptions],
) -> FilteredBatch:
    """Keep the rows of the groups that `select_groups` keeps, in their order.

    verl splits a batch evenly over ranks and mini-batches. As verl does itself, the rows are filled
    up to a multiple of `divisor` with rows that train nothing: copies with an empty loss mask, zero
    rewards and a group of their own. No kept row is lost or counted twice.
    `metric` names a column of `non_tensor_batch` to score instead of the reward.
    """
    if divisor < 1:
        raise MooredError(f"divisor must be at least 1, got {divisor}")
    selection = _select(batch, metric, options)
    rows = np.flatnonzero(selection.row_mask(batch.non_tensor_batch["uid"]))
    num_padding = -len(rows) % divisor
    filler = np.resize(rows, num_padding) if len(rows) else rows
    chosen = batch.select_idxs(np.concatenate([rows, filler]))
    mask = _response_mask(chosen)
    is_real = mask.new_tensor(np.arange(len(chosen)) < len(rows))
    filled = _with_rows(chosen, is_real, RAW_REWARDS)
    uids = np.array(chosen.non_tensor_batch["uid"], dtype=object)
    uids[len(rows) :] = PADDING_UID
    filled.non_tensor_batch["uid"] = uids
    return _filtered(batch, filled, selection, num_padding)


def mask_rows(
    batch: DataProto, *, metric: str | None = None, **options: Unpack[SelectOptions]
) -> FilteredBatch:
    """Empty the loss mask of dropped groups; every row stays.

    Policy, KL and entropy terms of dropped rows vanish and token counts leave them out. If no group
    is kept nothing is masked, as verl cannot average over nothing: skip the update (`is_empty`).
    """
    selection = _select(batch, metric, options)
    is_kept = selection.row_mask(batch.non_tensor_batch["uid"]) | (len(selection.kept) == 0)
    masked = _with_rows(batch, _response_mask(batch).new_tensor(is_kept))
    return _filtered(batch, masked, selection)


def soft_grpo(
    token_level_rewards: Any,
    response_mask: Any,
    index: np.ndarray | None = None,
    config: AlgorithmConfig | None = None,
    **_: object,
) -> tuple[Any, Any]:
    """GRPO's advantages times score / largest score of the batch: an advantage estimator of verl.

    The score is that of `algorithm.moored` (`score`, `ddof`; default: population variance), and
    `norm_adv_by_std_in_grpo` means what it means for verl's `grpo`. Groups without variance and
    missing rewards have advantage 0.
    """
    if index is None:
        raise MooredError("soft_grpo needs the group of every row; the batch has no `uid`")
    settings = filter_options(config)
    score, ddof = settings.get("score", "variance"), settings.get("ddof", 0)
    rewards = token_level_rewards.sum(dim=-1).float().cpu().numpy()
    selection = select_groups(rewards, index, score=score, ddof=ddof, rule="none")
    weights = dict(zip(selection.labels.tolist(), selection.weights.tolist(), strict=True))
    is_normalised = config is None or config.get("norm_adv_by_std_in_grpo", True)
    plain = grpo(rewards, index, ddof=1) if is_normalised else dr_grpo(rewards, index)
    weighted = plain * np.array([weights[label] for label in index.tolist()])
    advantages = token_level_rewards.new_tensor(weighted).unsqueeze(-1) * response_mask
    return advantages, advantages


def filter_options(algorithm: AlgorithmConfig | None) -> SelectOptions:
    """Options of `select_groups` that stand under `algorithm.moored`, checked."""
    found = dict((algorithm.get(CONFIG_KEY, None) if algorithm is not None else None) or {})
    for name in found:
        check_name("option of algorithm.moored", name, tuple(SelectOptions.__annotations__))
    options = SelectOptions(**found)
    _check_options(options)
    return options


def _check_options(options: SelectOptions) -> None:
    check_reward_score(options.get("score", "variance"), "verl")
    select_groups([[0.0, 1.0]], **options)


def _select(batch: DataProto, metric: str | None, options: SelectOptions) -> Selection:
    _check_options(options)
    if "uid" not in batch.non_tensor_batch:
        raise MooredError(
            "the batch has no `uid` in its non_tensor_batch, so its groups are unknown; verl sets "
            "it before generation"
        )
    return select_groups(_rewards(batch, metric), batch.non_tensor_batch["uid"], **options)


def _rewards(batch: DataProto, metric: str | None) -> np.ndarray:
    """(rows,) reward of each trajectory."""
    if metric is not None:
        check_name("metric of the batch", metric, tuple(batch.non_tensor_batch))
        return np.asarray(batch.non_tensor_batch[metric], dtype=np.float64)
    name = next((name for name in RAW_REWARDS if name in batch.batch), None)
    if name is None:
        raise MooredError(f"the batch holds no rewards; it needs one of {', '.join(RAW_REWARDS)}")
    return batch.batch[name].sum(dim=-1).float().cpu().numpy()


def _response_mask(batch: DataProto) -> Any:
    """The loss mask of the responses; without one, their attention mask, as in verl."""
    if "response_mask" in batch.batch:
        return batch.batch["response_mask"]
    return batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :]


def _with_rows(batch: DataProto, is_used: Any, names: tuple[str, ...] = ()) -> DataProto:
    """A copy whose loss masks, and tensors called `names`, are zero in rows that are not used."""
    tensors = batch.batch.clone(recurse=False)
    tensors["response_mask"] = _response_mask(batch) * is_used.unsqueeze(-1)
    for name in ("loss_mask", *names):
        if name in tensors:
            tensors[name] = tensors[name] * is_used.to(tensors[name].dtype).unsqueeze(-1)
    columns, meta = dict(batch.non_tensor_batch), dict(batch.meta_info)
    return replace(batch, batch=tensors, non_tensor_batch=columns, meta_info=meta)


def _filtered(
    batch: DataProto, result: DataProto, selection: Selection, num_padding: int = 0
) -> FilteredBatch:
    num_generated = int(_response_mask(batch).sum())
    num_trained = int(_response_mask(result).sum()) if len(selection.kept) else 0
    metrics = selection.metrics() | {
        "tokens/trained": float(num_trained),
        "tokens/discarded": float(num_generated - num_trained),
        "update/is_empty": float(num_trained == 0),
    }
    return FilteredBatch(
        batch=result, selection=selection, metrics=metrics, num_padding=num_padding
    )
