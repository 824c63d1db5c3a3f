"""Filtering of verl's `DataProto`, with the real verl: rows, masks, advantages, losses."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moored.algo import select_groups
from moored.errors import MooredError
from moored.integrations.verl import (
    PADDING_UID,
    filter_options,
    mask_rows,
    select_rows,
    soft_grpo,
)
from tests.unit.verl_batches import LOSS_TOKENS, REWARDS, UIDS, make_batch, needs_verl

# verl and what it imports give warnings that are not about our code.
pytestmark = [needs_verl, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[3]
KEPT = [row for row, uid in enumerate(UIDS) if uid != "b"]
LOSSES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def test_rows_of_kept_groups_stay_in_their_order():
    batch = make_batch()
    found = select_rows(batch)
    expected = select_groups([REWARDS[uid] for uid in "abc"])
    assert found.selection.kept.tolist() == expected.kept.tolist() == [0, 2]
    assert found.batch.non_tensor_batch["uid"].tolist() == ["a", "c"] * 4
    assert (found.batch.batch["input_ids"] == batch.batch["input_ids"][KEPT]).all()
    assert found.batch.meta_info == {"temperature": 1.0}
    assert found.num_padding == 0 and not found.is_empty


def test_metrics_tell_groups_and_tokens():
    metrics = select_rows(make_batch()).metrics
    assert metrics["filter/kept_fraction"] == pytest.approx(2 / 3)
    assert metrics["filter/score_mean"] == pytest.approx(1.25 / 3)
    kept = sum(LOSS_TOKENS[row] for row in KEPT)
    assert (metrics["tokens/trained"], metrics["tokens/discarded"]) == (kept, 24 - kept)
    assert mask_rows(make_batch()).metrics == metrics


def test_the_options_are_those_of_select_groups():
    assert select_rows(make_batch(), value=0.5).selection.labels[[2]].tolist() == ["c"]
    assert len(select_rows(make_batch(), value=0.5).batch) == 4
    assert len(select_rows(make_batch(), rule="none").batch) == 12


def test_remainders_are_filled_with_rows_that_train_nothing():
    batch = make_batch()
    found = select_rows(batch, divisor=5)
    assert (len(found.batch), found.num_padding) == (10, 2)
    assert found.batch.non_tensor_batch["uid"][8:].tolist() == [PADDING_UID] * 2
    assert found.batch.batch["response_mask"][8:].sum() == 0
    assert found.batch.batch["token_level_scores"][8:].sum() == 0
    assert (found.batch.batch["responses"][8:] == batch.batch["responses"][[0, 2]]).all()
    assert found.batch.batch["response_mask"][:8].sum() == found.metrics["tokens/trained"]
    filled: Any = found.batch
    assert [len(part) for part in filled.chunk(5)] == [2] * 5


def test_more_padding_than_rows_repeats_them():
    found = select_rows(make_batch(), divisor=32, value=0.5)
    assert (len(found.batch), found.num_padding) == (32, 28)
    assert found.batch.batch["response_mask"][4:].sum() == 0


def test_kept_groups_without_a_loss_token_are_an_empty_update():
    import torch

    found = mask_rows(make_batch(response_mask=torch.zeros(12, 4, dtype=torch.long)))
    assert len(found.selection.kept) > 0
    assert found.is_empty and found.metrics["update/is_empty"] == 1


def test_a_batch_without_variance_is_empty():
    batch = make_batch()
    batch.batch["token_level_scores"].zero_()
    selected, masked = select_rows(batch, divisor=4), mask_rows(batch)
    assert selected.is_empty and len(selected.batch) == 0
    assert masked.is_empty and masked.batch.batch["response_mask"].sum() == 24
    assert selected.metrics == masked.metrics
    assert masked.metrics["tokens/trained"] == 0 and masked.metrics["update/is_empty"] == 1


def test_masking_empties_dropped_rows_and_leaves_the_batch_as_it_was():
    batch = make_batch()
    batch.batch["loss_mask"] = batch.batch["response_mask"].float()
    found = mask_rows(batch)
    for name in ("response_mask", "loss_mask"):
        counts = [0 if uid == "b" else n for uid, n in zip(UIDS, LOSS_TOKENS, strict=True)]
        assert found.batch.batch[name].sum(dim=1).tolist() == counts
        assert batch.batch[name].sum() == 24
    assert found.batch.batch["responses"] is batch.batch["responses"]


def test_without_a_response_mask_the_attention_mask_counts():
    batch = make_batch()
    del batch.batch["response_mask"]
    found = mask_rows(batch).batch.batch["response_mask"]
    assert found[1].tolist() == [0, 0, 0, 0] and found[3].tolist() == [1, 1, 1, 1]


def test_a_column_may_be_scored_instead_of_the_reward():
    # acc is the same in each group
    assert select_rows(make_batch(), metric="acc").is_empty
    with pytest.raises(MooredError, match="accuracy"):
        select_rows(make_batch(), metric="accuracy")


def test_what_is_missing_is_named():
    batch = make_batch()
    del batch.batch["token_level_scores"]
    with pytest.raises(MooredError, match="token_level_scores, rm_scores"):
        select_rows(batch)
    batch.non_tensor_batch.pop("uid")
    with pytest.raises(MooredError, match="`uid`"):
        mask_rows(batch)
    with pytest.raises(MooredError, match="divisor"):
        select_rows(make_batch(), divisor=0)
    with pytest.raises(MooredError, match="length"):
        select_rows(make_batch(), score="length")


@pytest.mark.parametrize(
    ("config", "a", "c"),
    [
        # GRPO: half the spread over the sample std, sqrt(3)/2 for both; weights 1/4 and 1
        ({}, math.sqrt(3) / 8, math.sqrt(3) / 2),
        # stds 1/2 and 1
        ({"moored": {"score": "std"}}, math.sqrt(3) / 4, math.sqrt(3) / 2),
        ({"norm_adv_by_std_in_grpo": False}, 0.5 / 4, 1.0),
    ],
)
def test_soft_advantages_are_grpos_times_the_share_of_the_largest_score(config, a, c):
    batch = make_batch()
    mask = batch.batch["response_mask"]
    found, returns = soft_grpo(
        batch.batch["token_level_scores"], mask, batch.non_tensor_batch["uid"], config
    )
    assert returns is found and found.dtype == batch.batch["token_level_scores"].dtype
    size = {"a": a, "b": 0.0, "c": c}
    signs = [0 if uid == "b" else (1 if row // 3 in (0, 3) else -1) for row, uid in enumerate(UIDS)]
    expected = [sign * size[uid] for sign, uid in zip(signs, UIDS, strict=True)]
    np.testing.assert_allclose(found[:, 0].numpy(), expected, atol=1e-5)
    assert ((found == 0) | (mask == 1)).all()


def test_verl_finds_the_estimator_and_agrees_up_to_the_weight():
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
        get_adv_estimator_fn,
        register_adv_est,
    )
    from verl.trainer.ppo.ray_trainer import (  # pyright: ignore[reportMissingImports]
        compute_advantage,
    )

    register_adv_est("moored_soft_grpo")(soft_grpo)
    assert get_adv_estimator_fn("moored_soft_grpo") is soft_grpo
    batch = make_batch()
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    names: Any = ("grpo", "moored_soft_grpo")
    plain, soft = (compute_advantage(batch, name).batch["advantages"] for name in names)
    weights = plain.new_tensor([{"a": 0.25, "b": 0.0, "c": 1.0}[uid] for uid in UIDS])
    np.testing.assert_allclose(soft, plain * weights[:, None], atol=1e-6)


def test_a_missing_reward_has_no_advantage():
    batch = make_batch()
    scores = batch.batch["token_level_scores"]
    scores[0, 0] = math.nan
    found, _ = soft_grpo(scores, batch.batch["response_mask"], batch.non_tensor_batch["uid"])
    assert found.isfinite().all() and found[0].abs().sum() == 0 and found[3, 0] < 0


def test_options_of_the_configuration_are_checked():
    assert filter_options({"moored": {"value": 0.8}}) == {"value": 0.8}
    assert filter_options({}) == filter_options(None) == {}
    with pytest.raises(MooredError, match=r"algorithm.moored"):
        filter_options({"moored": {"valeu": 0.8}})
    with pytest.raises(MooredError, match="top_q"):
        filter_options({"moored": {"rule": "top_q"}})


def test_verls_own_configuration_takes_the_documented_lines():
    import verl.trainer.config as verl_config  # pyright: ignore[reportMissingImports]
    from hydra import compose, initialize_config_dir  # pyright: ignore[reportMissingImports]

    text = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(export VERL_USE.*?)```", text, re.DOTALL)
    lines = [line for line in block.replace("\\\n", " ").split() if "=" in line]
    assert lines[0] == "VERL_USE_EXTERNAL_MODULES=moored.integrations.verl_trainer"
    with initialize_config_dir(str(Path(verl_config.__file__).parent), version_base=None):
        config = compose("ppo_trainer", overrides=lines[1:])
    assert config.trainer.use_v1 and config.trainer.v1.trainer_mode == "moored_sync"
    assert filter_options(config.algorithm) == {"rule": "top_p", "value": 0.9}
    workers = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert workers.VERL_USE_EXTERNAL_MODULES == "moored.integrations.verl_trainer"


def loss_and_gradient(batch: Any, mode: str, rows: int) -> tuple[float, Any]:
    """verl's own actor loss, with entropy bonus and KL, on a batch with log-probs as parameters.

    `rows` is the configured mini-batch, which the seq-mean modes divide by.
    """
    from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
    from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]
    from verl.workers.utils.losses import ppo_loss  # pyright: ignore[reportMissingImports]
    from verl.workers.utils.padding import (  # pyright: ignore[reportMissingImports]
        left_right_2_no_padding,
    )

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
    )
    theta = batch.batch["log_probs"].clone().requires_grad_()
    inside = batch.batch["attention_mask"].bool()
    data = left_right_2_no_padding(batch.to_tensordict())
    # The engine counts loss tokens like this.
    num_tokens = data["loss_mask"].sum().item()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=rows)
    output = {"log_probs": theta[inside], "entropy": (-theta * theta.exp())[inside]}
    loss, _ = ppo_loss(config, output, data)
    loss.backward()
    return loss.item(), theta.grad


def batch_with_log_probs() -> Any:
    import torch

    draw = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(12, 7, generator=draw)
    old, ref = (-torch.rand(12, 4, generator=draw) for _ in range(2))
    batch = make_batch(log_probs=log_probs, old_log_probs=old, ref_log_prob=ref)
    uids, scores = batch.non_tensor_batch["uid"], batch.batch["token_level_scores"]
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
        compute_grpo_outcome_advantage,
    )

    mask = batch.batch["response_mask"]
    batch.batch["advantages"], _ = compute_grpo_outcome_advantage(scores, mask, uids)
    return batch


@pytest.mark.parametrize("mode", LOSSES)
def test_a_masked_update_is_that_of_the_kept_rows(mode):
    batch = batch_with_log_probs()
    kept = batch.select_idxs(np.array(KEPT))
    loss, gradient = loss_and_gradient(mask_rows(batch).batch, mode, rows=12)
    expected, expected_gradient = loss_and_gradient(kept, mode, rows=8)
    # Modes that divide by the configured mini-batch keep dividing by dropped rows too.
    factor = 8 / 12 if mode.startswith("seq-mean") else 1.0
    assert loss == pytest.approx(factor * expected, rel=1e-5)
    np.testing.assert_allclose(gradient[KEPT], factor * expected_gradient, atol=1e-6)
    dropped = [row for row in range(12) if row not in KEPT]
    assert gradient[dropped].abs().sum() == 0 and gradient[KEPT].abs().sum() > 0


def test_dropped_groups_leave_a_trace_without_the_mask():
    _, gradient = loss_and_gradient(batch_with_log_probs(), "token-mean", rows=12)
    assert all(gradient[row].abs().sum() > 0 for row in range(12))


@pytest.mark.parametrize("mode", LOSSES)
def test_rows_that_fill_up_change_no_loss(mode):
    batch = batch_with_log_probs()
    loss, gradient = loss_and_gradient(select_rows(batch, divisor=5).batch, mode, rows=10)
    expected, expected_gradient = loss_and_gradient(select_rows(batch).batch, mode, rows=10)
    assert loss == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient[:8], expected_gradient, atol=1e-6)
    assert gradient[8:].abs().sum() == 0


@pytest.mark.parametrize("mode", LOSSES)
def test_verls_loss_by_itself_counts_kept_rows_only(mode):
    from verl.trainer.ppo.core_algos import agg_loss  # pyright: ignore[reportMissingImports]

    batch = make_batch()
    values, masked = batch.batch["token_level_scores"], mask_rows(batch).batch.batch
    found = agg_loss(values, masked["response_mask"], mode)
    expected = agg_loss(values[KEPT], batch.batch["response_mask"][KEPT], mode)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
