"""Losses of an update, worked out by hand on two sequences of one and three tokens."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch

from moored.config import AlgorithmConfig
from moored.names import AGGREGATIONS, Aggregation, KLEstimator
from moored.training.losses import (
    TokenStream,
    cispo,
    gspo,
    imitation,
    kl_estimate,
    policy_loss,
    ppo_clip,
    update_figures,
    value_loss,
)
from moored.training.samples import Sample, token_weights
from moored.types import Prompt

ONE_AND_THREE = torch.tensor([0, 1, 1, 1])


def weights_of(how: Aggregation) -> torch.Tensor:
    """Of a sequence of one token and one of three, with a longest reply of ten."""
    samples = [
        Sample(
            prompt=Prompt(np.array([1])),
            ids_T=np.arange(length),
            loss_mask_T=np.ones(length, dtype=bool),
            old_logprobs_T=np.zeros(length),
            turn_ends_T=np.zeros(length, dtype=bool),
            rewards_T=np.zeros(length),
            group=0,
            trajectory=number,
        )
        for number, length in enumerate((1, 3))
    ]
    arrays = token_weights(samples, how, max_length=10)
    return torch.from_numpy(np.concatenate(arrays)).float()


def stream(how: Aggregation = "token_mean", **replaced: torch.Tensor | None) -> TokenStream:
    given = {
        "logp": torch.full((4,), -1.0),
        "entropy": torch.tensor([2.0, 1.0, 3.0, 4.0]),
        "old_logp": torch.full((4,), -1.0),
        "ref_logp": None,
        "advantages": torch.zeros(4),
        "weights": weights_of(how),
        "mean_weights": torch.full((4,), 0.25),
        "sequence": ONE_AND_THREE,
        **replaced,
    }
    return TokenStream(**given)  # pyright: ignore[reportArgumentType]


def options(**replaced: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"entropy_coef": 0.0, **replaced})


every_aggregation = pytest.mark.parametrize("how", AGGREGATIONS)


@every_aggregation
def test_the_entropy_bonus_is_a_token_mean_under_every_aggregation(how: str):
    # (2 + 1 + 3 + 4) / 4 = 2.5, times 0.1.
    terms, parts = policy_loss(stream(cast(Aggregation, how)), options(entropy_coef=0.1))
    assert numbers(terms) == pytest.approx({"task": 0.0, "entropy": -0.25})
    assert update_figures(numbers(parts))["entropy"] == pytest.approx(2.5)


@every_aggregation
@pytest.mark.parametrize(("kind", "of_half"), [("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_is_a_token_mean_under_every_aggregation(how: str, kind: str, of_half: float):
    # Only the first token differs from the reference, by 0.5: its KL over four tokens.
    reference = torch.tensor([-1.5, -1.0, -1.0, -1.0])
    given = stream(cast(Aggregation, how), ref_logp=reference)
    terms, parts = policy_loss(given, options(kl_coef=0.2, kl_estimator=kind))
    assert numbers(terms) == pytest.approx({"task": 0.0, "kl": 0.2 * of_half / 4}, rel=1e-5)
    assert update_figures(numbers(parts))["kl"] == pytest.approx(of_half / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # Advantage -1 on the first token (loss 1) and on the last of the other sequence (loss 1).
        ("token_mean", 2 / 4),
        ("seq_mean_token_mean", (1 + 1 / 3) / 2),
        ("seq_mean_token_sum", (1 + 1) / 2),
        ("constant", 2 / (2 * 10)),
    ],
)
def test_the_clipped_loss_keeps_the_aggregation_of_its_algorithm(how: str, expected: float):
    given = stream(cast(Aggregation, how), advantages=torch.tensor([-1.0, 0.0, 0.0, -1.0]))
    terms, parts = policy_loss(given, options())
    assert numbers(terms) == pytest.approx({"task": expected})
    assert float(parts["policy_loss"]) == pytest.approx(expected)


@every_aggregation
def test_the_clip_fraction_is_a_share_of_the_loss_tokens(how: str):
    # Ratios 2, 0.5, 1.1 and 1: two of four leave [0.8, 1.28].
    logp = torch.log(torch.tensor([2.0, 0.5, 1.1, 1.0])) - 1.0
    _, parts = policy_loss(stream(cast(Aggregation, how), logp=logp), options())
    figures = update_figures(numbers(parts))
    assert figures["clip_fraction"] == pytest.approx(0.5)
    # r - 1 - log r over four tokens.
    kl = sum(r - 1 - math.log(r) for r in (2.0, 0.5, 1.1, 1.0)) / 4
    assert figures["old_policy_kl"] == pytest.approx(kl, rel=1e-4)


def test_the_clip_fraction_of_gspo_counts_the_ratio_that_is_clipped():
    # Log-ratios 0 and (0.6, -0.3, -0.3), mean 0: no sequence is clipped, though its tokens are far.
    logp = torch.tensor([0.0, 0.6, -0.3, -0.3]) - 1.0
    _, parts = policy_loss(stream(logp=logp), options(), gspo)
    assert update_figures(numbers(parts))["clip_fraction"] == 0.0
    _, parts = policy_loss(stream(logp=logp), options())
    assert update_figures(numbers(parts))["clip_fraction"] == pytest.approx(0.75)


def one_loss(ratio: float, advantage: float, **replaced: object) -> float:
    """PPO's loss of a token of this ratio and advantage."""
    logp, advantages = torch.full((4,), math.log(ratio) - 1.0), torch.full((4,), advantage)
    loss, _ = ppo_clip(stream(logp=logp, advantages=advantages), options(**replaced))
    return float(loss[0])


def test_ppo_inside_the_clip_range_is_minus_ratio_times_advantage():
    assert one_loss(1.1, 2.0) == pytest.approx(-2.2)
    assert one_loss(0.9, -2.0) == pytest.approx(1.8)


def test_ppo_stops_gains_beyond_the_clip_range():
    assert one_loss(1.5, 1.0) == pytest.approx(-1.28)
    assert one_loss(0.5, -1.0) == pytest.approx(0.8)


def test_ppo_keeps_losses_beyond_the_clip_range():
    assert one_loss(0.5, 1.0) == pytest.approx(-0.5)
    assert one_loss(1.5, -1.0) == pytest.approx(1.5)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    assert one_loss(10.0, -1.0) == pytest.approx(3.0)
    assert one_loss(10.0, -1.0, dual_clip=None) == pytest.approx(10.0)
    assert one_loss(10.0, 1.0) == pytest.approx(-1.28)


def test_losses_equal_a_loop_over_tokens():
    rng = np.random.default_rng(7)
    new, old, advantages, values, before, target = rng.normal(size=(6, 45))
    given = stream(
        logp=torch.from_numpy(new),
        old_logp=torch.from_numpy(old),
        advantages=torch.from_numpy(advantages),
    )
    policy, is_clipped = ppo_clip(given, options(clip_low=0.1, clip_high=0.3, dual_clip=2.0))
    near, far, aim = (torch.from_numpy(x) for x in (values, before, target))
    critic = value_loss(near, far, aim, 0.4)
    for t in range(45):
        ratio, a = math.exp(new[t] - old[t]), advantages[t]
        gain = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
        assert float(policy[t]) == pytest.approx(-max(gain, 2.0 * a) if a < 0 else -gain)
        assert bool(is_clipped[t]) == (not 0.9 <= ratio <= 1.3)
        kept = before[t] + min(max(values[t] - before[t], -0.4), 0.4)
        errors = (values[t] - target[t]) ** 2, (kept - target[t]) ** 2
        assert float(critic[t]) == pytest.approx(max(errors) / 2)


def test_gspo_has_one_ratio_for_a_sequence():
    # Log-ratios 0.1 of the one, and 0.1, 0.2 and 0.3 of the other: mean 0.2.
    logp = torch.tensor([0.1, 0.1, 0.2, 0.3]) - 1.0
    loss, _ = gspo(stream(logp=logp, advantages=-torch.ones(4)), options())
    np.testing.assert_allclose(loss.tolist(), np.exp([0.1, 0.2, 0.2, 0.2]), rtol=1e-6)


def test_kl_estimators_by_hand():
    # p = 1/2, q = 1/4 at the sampled token: d = log 2
    d, pair = math.log(2), (torch.tensor(math.log(0.5)), torch.tensor(math.log(0.25)))
    assert float(kl_estimate(*pair, "k1")) == pytest.approx(d)
    assert float(kl_estimate(*pair, "k2")) == pytest.approx(d * d / 2)
    assert float(kl_estimate(*pair, "k3")) == pytest.approx(0.5 - 1 + d)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_exact_kl_as_expectation(kind: KLEstimator):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    exact = float((p * torch.log(p / q)).sum())
    assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(exact)


# Ratios 6, 1.1, 0.5 and 2 of tokens with advantages 1, 2, -1 and -0.5; log pi is log r - 1.
RATIOS, ADVANTAGES = (6.0, 1.1, 0.5, 2.0), (1.0, 2.0, -1.0, -0.5)


def test_cispo_weighs_log_probabilities_by_clipped_ratios_that_have_no_gradient():
    logp = (torch.log(torch.tensor(RATIOS)) - 1.0).requires_grad_()
    given = stream(logp=logp, advantages=torch.tensor(ADVANTAGES))
    loss, is_clipped = cispo(given, options(clip_high=4.0))
    # -min(r, 5) A log pi
    by_hand = -np.array([5.0, 1.1, 0.5, 2.0]) * ADVANTAGES * (np.log(RATIOS) - 1.0)
    np.testing.assert_allclose(loss.tolist(), by_hand, rtol=1e-5)
    assert is_clipped.tolist() == [True, False, False, False]
    # The clipped token keeps its gradient, -5 A; PPO's clip would leave it without one.
    (slopes,) = torch.autograd.grad(loss.sum(), logp)
    np.testing.assert_allclose(slopes.tolist(), [-5.0, -2.2, 0.5, 1.0], rtol=1e-5)
    loss, _ = ppo_clip(given, options(clip_high=4.0))
    (slopes,) = torch.autograd.grad(loss.sum(), logp)
    assert slopes[0] == 0.0


def test_imitation_raises_log_probabilities_whatever_the_ratio():
    given = stream(logp=torch.log(torch.tensor(RATIOS)), advantages=torch.ones(4))
    loss, is_clipped = imitation(given, options())
    np.testing.assert_allclose(loss.tolist(), -np.log(RATIOS), rtol=1e-5)
    assert not is_clipped.any()


def test_tokens_without_a_share_enter_no_figure():
    # The last token is masked: entropies 2, 1 and 3 remain.
    shares = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3
    logp = torch.tensor([-1.0, -1.0, -1.0, 5.0])
    _, parts = policy_loss(stream(mean_weights=shares, logp=logp), options())
    figures = update_figures(numbers(parts))
    assert figures["entropy"] == pytest.approx(2.0)
    assert figures["clip_fraction"] == 0.0 and figures["logp_gap_max"] == 0.0
    assert figures["effective_share"] == 1.0


def test_a_soft_share_scales_the_entropy_bonus_but_not_the_logged_entropy():
    # A group of weight one half: its tokens give 0.5 / 4 each.
    shares = torch.tensor([0.25, 0.125, 0.125, 0.125])
    terms, parts = policy_loss(stream(mean_weights=shares), options(entropy_coef=1.0))
    assert float(terms["entropy"]) == pytest.approx(-(0.5 + (1 + 3 + 4) / 8))
    assert update_figures(numbers(parts))["entropy"] == pytest.approx(2.5)


def test_the_value_loss_is_half_the_larger_squared_error():
    values, old, target = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([1.0])
    # Near the old value V is 0.5, whose error is 0.25; V itself has 1.
    assert float(value_loss(values, old, target, 0.5)) == pytest.approx(0.5)
    assert float(value_loss(values, old, target, None)) == pytest.approx(0.5)
    # Target 3: errors 1 and 6.25.
    assert float(value_loss(values, old, torch.tensor([3.0]), 0.5)) == pytest.approx(3.125)


def numbers(parts: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items()}
