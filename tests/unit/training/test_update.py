"""Selection, advantages and token weights of an update, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from moored.config import AlgorithmConfig, Config, load_config
from moored.engine.base import Learner
from moored.errors import ConfigError, MooredError
from moored.names import ALGORITHMS
from moored.training.algorithms import load_algorithm
from moored.training.samples import (
    LossSample,
    Sample,
    TokenAdvantages,
    score_groups,
    select_samples,
    step_metrics,
)
from moored.training.update import (
    NotFiniteError,
    estimate_advantages,
    loss_samples,
    lr_factor,
    update,
    with_old_logprobs,
)
from moored.types import Group, Prompt, ScoreRequest, StopReason, Trajectory, Turn

BY_LEARNER = AlgorithmConfig(old_logprobs="learner")


def trajectory(reward: float, length: int, task_seed: int, logprob: float = -1.0) -> Trajectory:
    turn = Turn(
        prompt=Prompt(np.array([1, 2, task_seed])),
        completion_ids=np.arange(length),
        logprobs=np.full(length, logprob),
        reply="",
        reward=reward,
    )
    return Trajectory(
        env="toy", task_seed=task_seed, episode_seed=0, turns=(turn,), stop=StopReason.DONE
    )


def group(number: int, rewards: Sequence[float], lengths: Sequence[int] | None = None) -> Group:
    lengths = lengths or [2] * len(rewards)
    members = [trajectory(r, n, number) for r, n in zip(rewards, lengths, strict=True)]
    return Group(group_id=number, env="toy", task_seed=number, trajectories=tuple(members))


class Recorder:
    """A learner that only records; `others` are more statistics of its updates, in turn."""

    def __init__(self, loss: float = 0.0, others: Sequence[dict[str, float]] = ()) -> None:
        self.loss = loss
        self.others = iter(others)
        self.factors: list[float] = []
        self.seen: list[list[LossSample]] = []

    def step(
        self, minibatches: Sequence[Sequence[LossSample]], *, lr_factor: float = 1.0
    ) -> Iterator[dict[str, float]]:
        for samples in minibatches:
            self.factors.append(lr_factor)
            self.seen.append(list(samples))
            yield {"policy_loss": self.loss, **next(self.others, {})}


def train_on(
    config: Config, learner: Recorder, groups: Sequence[Group], step: int = 1
) -> dict[str, float]:
    """Select, estimate and update, as a training step does."""
    algorithm, trained = load_algorithm(config.algorithm), cast(Learner, learner)
    selection = score_groups(config.filter, groups)
    samples = select_samples(config, groups, selection)
    advantages = estimate_advantages(config, algorithm, trained, groups, samples)
    return update(config, algorithm, trained, samples, advantages, selection, step)


def one_update(groups: Sequence[Group], *overrides: str) -> list[LossSample]:
    """Samples of a single minibatch in their order, with advantages and weights."""
    learner = Recorder()
    train_on(options(*overrides), learner, groups)
    if not learner.seen:
        return []
    (minibatch,) = learner.seen
    return sorted(minibatch, key=lambda given: given.sample.trajectory)


def options(*overrides: str) -> Config:
    base = ["algorithm.name=dapo", "optimizer.num_minibatches=1", "rollout.max_response_tokens=10"]
    return load_config({}, [*base, *overrides])


# Variances 1/4 and 1/16, eight tokens in all.
TWO = [group(0, [0.0, 1.0]), group(1, [0.0, 0.5])]


def weights(samples: Sequence[LossSample]) -> list[list[float]]:
    return [given.weights_T.tolist() for given in samples]


def test_soft_weighs_a_group_by_its_share_of_the_largest_score():
    samples = one_update(TWO, "filter.action=soft", "filter.rule=top_k_count", "filter.value=1")
    assert weights(samples) == [[1 / 8, 1 / 8]] * 2 + [[1 / 32, 1 / 32]] * 2


def test_mask_keeps_samples_without_weight_and_divides_by_the_kept_tokens():
    keep_one = ["filter.rule=top_k_count", "filter.value=1"]
    masked = one_update(TWO, "filter.action=mask", *keep_one)
    assert weights(masked) == [[1 / 4, 1 / 4]] * 2 + [[0, 0]] * 2
    assert weights(one_update(TWO, "filter.action=drop", *keep_one)) == [[1 / 4, 1 / 4]] * 2


def test_loss_scale_scales_the_learning_rate_by_the_kept_fraction_or_its_root():
    # AdamW would cancel a factor on the loss, so the weights of tokens stay.
    keep_one = ["filter.rule=top_k_count", "filter.value=1"]
    for scale, factor in (("none", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)):
        learner = Recorder()
        train_on(options(*keep_one, f"filter.loss_scale={scale}"), learner, TWO)
        assert learner.factors == pytest.approx([factor])
        assert weights(learner.seen[0]) == [[1 / 4, 1 / 4]] * 2


def test_loss_scale_does_not_shrink_an_update_whose_dropped_groups_were_refilled():
    # Four groups drawn for a batch of two: two have variance, so that the update is a full one.
    drawn = [*TWO, group(2, [1.0, 1.0]), group(3, [0.0, 0.0])]
    refill = ["filter.rule=nonzero", "filter.action=refill", "filter.loss_scale=linear"]
    learner = Recorder()
    train_on(options(*refill, "rollout.num_groups=2"), learner, drawn)
    assert learner.factors == [1.0]
    # One of two is still missing after the last refill.
    train_on(options(*refill, "rollout.num_groups=2"), learner, drawn[1:])
    assert learner.factors == [1.0, 0.5]


def test_a_minibatch_without_kept_rows_is_skipped_and_counted():
    config = options(
        "filter.action=mask",
        "filter.rule=top_k_count",
        "filter.value=1",
        "optimizer.num_minibatches=4",
    )
    learner = Recorder()
    stats = train_on(config, learner, TWO)
    # Four minibatches of one trajectory each; two of them are of the group that was dropped.
    assert [part[0].sample.group for part in learner.seen] == [0, 0]
    assert stats["update/num_skipped"] == 2.0


def test_masked_tokens_are_not_counted_as_trained():
    config = options("filter.action=mask", "filter.rule=top_k_count", "filter.value=1")
    selection = score_groups(config.filter, TWO)
    samples = select_samples(config, TWO, selection)
    advantages = estimate_advantages(
        config, load_algorithm(config.algorithm), cast(Learner, None), TWO, samples
    )
    metrics = step_metrics(config.filter, TWO, selection, samples, advantages, {})
    assert (metrics["tokens/trained"], metrics["tokens/discarded"]) == (4.0, 4.0)
    assert metrics["update/is_empty"] == 0.0


class Critic(Recorder):
    """Predicts 0 everywhere."""

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.zeros(len(sample.ids_T) + 1) for sample in samples]


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_dropped_rows_do_not_change_the_whitening_of_kept_ones(name: str):
    # Under `mask` as under `drop`: rewards 0 and 1 become -1 and 1, whatever the others earned.
    groups = [group(0, [0.0, 1.0]), group(1, [7.0, 7.0])]
    for action in ("mask", "drop"):
        learner = Critic()
        train_on(options(f"algorithm.name={name}", f"filter.action={action}"), learner, groups)
        found = {g.sample.trajectory: g.advantages_T for part in learner.seen for g in part}
        np.testing.assert_allclose(found[0], [-1, -1], rtol=1e-6)
        np.testing.assert_allclose(found[1], [1, 1], rtol=1e-6)


def test_reinforce_pp_with_a_group_baseline_whitens_over_tokens():
    # Centred rewards -1, 1 with 1 and 3 tokens: mean 0.5, variance 0.75.
    (first, second) = one_update(
        [group(0, [0.0, 2.0], [1, 3])], "algorithm.name=reinforce_pp", "algorithm.advantage=dr_grpo"
    )
    assert first.advantages_T == pytest.approx([-1.5 / 0.75**0.5])
    assert second.advantages_T == pytest.approx([0.5 / 0.75**0.5] * 3)


def in_pieces(reward: float, task_seed: int) -> Trajectory:
    """Three turns of two tokens, each after a rewritten history; the last earns the reward."""
    turns = tuple(
        Turn(
            prompt=Prompt(np.array([1, 2, task_seed] if turn == 0 else [9, turn])),
            completion_ids=np.arange(2),
            logprobs=np.full(2, -1.0),
            reply="",
            reward=reward if turn == 2 else 0.0,
        )
        for turn in range(3)
    )
    return Trajectory(
        env="toy", task_seed=task_seed, episode_seed=0, turns=turns, stop=StopReason.DONE
    )


def test_the_samples_of_a_trajectory_stay_in_one_minibatch_and_weigh_as_one():
    members = (in_pieces(0.0, 0), in_pieces(1.0, 0), trajectory(0.0, 2, 0), trajectory(1.0, 2, 0))
    one = Group(group_id=0, env="toy", task_seed=0, trajectories=members)
    learner = Recorder()
    config = options(
        "filter.rule=none",
        "algorithm.aggregation=seq_mean_token_mean",
        "optimizer.num_minibatches=2",
    )
    train_on(config, learner, [one])
    assert len(learner.seen) == 2
    places = [{given.sample.trajectory for given in part} for part in learner.seen]
    assert all(len(place) == 2 for place in places) and not places[0] & places[1]
    for part in learner.seen:
        for number in {given.sample.trajectory for given in part}:
            own = [given for given in part if given.sample.trajectory == number]
            assert len(own) == (3 if number < 2 else 1)
            # Each of two trajectories has half of the loss.
            assert sum(given.weights_T.sum() for given in own) == pytest.approx(0.5)


def test_overlong_replies_lose_reward_under_every_algorithm():
    # Buffer 4 of 10: a reply of 10 tokens loses 1, and all else is equal.
    groups = [group(0, [1.0, 1.0], [2, 10])]
    for name in ALGORITHMS:
        learner = Critic()
        config = options(
            f"algorithm.name={name}", "filter.rule=none", "algorithm.overlong_buffer=4"
        )
        train_on(config, learner, groups)
        found = {g.sample.trajectory: g.advantages_T for part in learner.seen for g in part}
        assert found[0].max() > 0.0 > found[1].min(), name


def test_the_trajectory_baseline_keeps_the_ends_and_the_advantages_of_the_whole_group():
    groups = [group(0, [3.0, 0.0, 1.0, 2.0]), group(1, [5.0, 5.0, 5.0, 5.0])]
    samples = one_update(
        groups, "filter.rule=none", "filter.best_and_worst=1", "algorithm.name=dr_grpo"
    )
    assert [given.sample.trajectory for given in samples] == [0, 1, 4, 5]
    assert [given.advantages_T[0] for given in samples] == [1.5, -1.5, 0.0, 0.0]


def test_overlong_replies_change_advantages_but_not_which_groups_are_kept():
    # Buffer 4 of 10: 8 tokens lose 0.5, 10 lose 1. Shaped: [1, 0.5, 0] and [0, 0, -1].
    groups = [group(0, [1.0, 1.0, 1.0], [2, 8, 10]), group(1, [0.0, 1.0, 0.0], [2, 10, 10])]
    overrides = ["filter.score=std", "filter.rule=nonzero", "algorithm.overlong_buffer=4"]
    samples = one_update(groups, *overrides)
    assert [given.sample.group for given in samples] == [1, 1, 1]
    std = (2 / 9) ** 0.5
    expected = [1 / 3 / (std + 1e-6), 1 / 3 / (std + 1e-6), -2 / 3 / (std + 1e-6)]
    assert [given.advantages_T[0] for given in samples] == pytest.approx(expected)


def test_every_minibatch_of_a_step_gets_the_factor_of_that_step():
    config = options(
        "num_steps=4",
        "filter.rule=none",
        "optimizer.schedule=linear",
        "optimizer.num_minibatches=2",
        "optimizer.num_epochs=2",
    )
    learner = Recorder()
    for step in (1, 3):
        train_on(config, learner, TWO, step)
    assert learner.factors == [1.0] * 4 + [0.5] * 4


def test_an_update_that_is_not_finite_hands_over_its_minibatch():
    config = options("filter.rule=none", "optimizer.num_minibatches=2")
    learner = Recorder(loss=float("inf"))
    with pytest.raises(NotFiniteError, match="policy_loss of an update is not finite") as caught:
        train_on(config, learner, TWO)
    assert caught.value.samples == learner.seen[0] and len(learner.seen) == 1


def test_nothing_kept_means_no_samples_whatever_the_action():
    flat = [group(0, [1.0, 1.0]), group(1, [0.0, 0.0])]
    for action in ("drop", "mask", "soft"):
        assert one_update(flat, f"filter.action={action}") == []


def sample(mask: Sequence[bool], old: Sequence[float], number: int) -> Sample:
    return Sample(
        prompt=Prompt(np.array([1, 2, number])),
        ids_T=np.arange(len(mask)) + 10 * number,
        loss_mask_T=np.array(mask),
        old_logprobs_T=np.array(old),
        turn_ends_T=np.array(mask),
        rewards_T=np.zeros(len(mask)),
        group=number,
        trajectory=number,
    )


class Scorer:
    """Gives -1 for every token, but -1 + log 3 for token 12."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[list[np.ndarray]]:
        return [
            [np.where(ids == 12, -1.0 + np.log(3.0), -1.0) for ids in r.continuations]
            for r in requests
        ]


def test_log_probs_of_the_learner_replace_those_of_the_sampler_and_the_gap_is_told():
    # The token in the middle is an observation: it has no log-probability, and is not counted.
    given = [sample([True, False, True], [-1.0, 0.0, -1.0], 1), sample([True], [-1.5], 2)]
    found, gaps = with_old_logprobs(BY_LEARNER, cast(Learner, Scorer()), given)
    np.testing.assert_allclose(found[0].old_logprobs_T, [-1.0, 0.0, -1.0 + np.log(3.0)])
    np.testing.assert_allclose(found[1].old_logprobs_T, [-1.0])
    assert given[1].old_logprobs_T.tolist() == [-1.5]
    # Gaps 0, log 3 and 0.5; ratios 1, 3 and e^0.5.
    root = np.exp(0.5)
    assert gaps == pytest.approx(
        {
            "mismatch/logp_gap_mean": (np.log(3.0) + 0.5) / 3,
            "mismatch/logp_gap_max": np.log(3.0),
            "mismatch/effective_share": (4.0 + root) ** 2 / (3 * (10.0 + np.e)),
        }
    )


def test_equal_log_probs_leave_no_gap_and_every_token_counts_in_full():
    _, gaps = with_old_logprobs(
        BY_LEARNER, cast(Learner, Scorer()), [sample([True] * 2, [-1.0] * 2, 3)]
    )
    assert list(gaps.values()) == [0.0, 0.0, 1.0]
    assert with_old_logprobs(BY_LEARNER, cast(Learner, Scorer()), []) == ([], {})
    by_sampler = [sample([True], [-1.5], 3)]
    assert with_old_logprobs(AlgorithmConfig(), cast(Learner, None), by_sampler) == (by_sampler, {})


def test_the_gap_is_logged_of_the_first_minibatch_alone():
    # Later ones are off because the policy has moved, not because the engines differ.
    first = {"logp_gap_mean": 0.1, "logp_gap_max": 0.4, "effective_share": 0.9}
    later = {"logp_gap_mean": 0.5, "logp_gap_max": 2.0, "effective_share": 0.3}
    others = [{**first, "grad_norm": 1.0}, *({**later, "grad_norm": x} for x in (2.0, 3.0, 6.0))]
    config = options("filter.rule=none", "optimizer.num_minibatches=2", "optimizer.num_epochs=2")
    stats = train_on(config, Recorder(others=others), TWO)
    assert stats == {
        "update/num_skipped": 0.0,
        "learner/policy_loss": 0.0,
        "learner/grad_norm": 3.0,
        "mismatch/logp_gap_mean": 0.1,
        "mismatch/logp_gap_max": 0.4,
        "mismatch/effective_share": 0.9,
    }


def test_a_learner_need_not_report_a_gap():
    stats = train_on(options("filter.rule=none"), Recorder(), TWO)
    assert stats == {"update/num_skipped": 0.0, "learner/policy_loss": 0.0}


def test_a_capped_importance_weight_is_learner_over_sampler_up_to_the_cap():
    # Learner over sampler: 1, then 3, which the cap of 2 bounds; e^0.5 and e^-0.5 stay.
    given = [
        sample([True, False, True], [-1.0, 0.0, -1.0], 1),
        sample([True, True], [-1.5, -0.5], 2),
    ]
    capped = AlgorithmConfig(old_logprobs="learner", importance_cap=2.0)
    found, gaps = with_old_logprobs(capped, cast(Learner, Scorer()), given)
    assert found[0].importance_T is not None and found[1].importance_T is not None
    np.testing.assert_allclose(found[0].importance_T, [1.0, 1.0, 2.0])
    np.testing.assert_allclose(found[1].importance_T, [np.exp(0.5), np.exp(-0.5)])
    assert gaps["mismatch/capped_share"] == 0.25
    # The effective share is of the ratios as they are.
    plain, figures = with_old_logprobs(BY_LEARNER, cast(Learner, Scorer()), given)
    assert plain[0].importance_T is None
    assert figures == {name: gaps[name] for name in figures}


def test_importance_weighs_the_policy_loss_and_not_the_means_of_entropy_and_kl():
    given = sample([True, True], [-1.5, -0.5], 2)
    given = replace(given, importance_T=np.array([2.0, 0.5]))
    advantages = TokenAdvantages(advantages_T=np.array([1.0, -1.0]))
    half = np.array([0.5, 0.5])
    (found,) = loss_samples([given], [advantages], [half], [half])
    assert found.weights_T.tolist() == [1.0, 0.25]
    assert found.mean_weights_T.tolist() == [0.5, 0.5]
    assert found.advantages_T.tolist() == [1.0, -1.0]


def test_a_cap_without_log_probs_of_the_learner_is_refused():
    with pytest.raises(ConfigError, match=r"set algorithm\.old_logprobs=learner, or leave the cap"):
        load_config({}, ["algorithm.importance_cap=2"])


def factors(num_steps: int, **options) -> list[float]:
    return [lr_factor(step, num_steps, **options) for step in range(1, num_steps + 1)]


def test_constant_is_one_after_a_straight_warmup():
    assert factors(3) == [1, 1, 1]
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_falls_in_equal_steps_and_the_last_step_still_learns():
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2, min_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]
    )


def test_cosine_is_slow_at_both_ends_and_half_in_the_middle():
    # (1 + cos(k pi / 4)) / 2 for k = 0, 1, 2, 3
    assert factors(4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert lr_factor(3, 4, schedule="cosine", min_ratio=0.1) == pytest.approx(0.55)


def test_steps_after_the_last_stay_at_the_smallest_rate():
    assert lr_factor(9, 4, schedule="linear", min_ratio=0.1) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_never_ends():
    assert factors(2, schedule="cosine", warmup_steps=10) == [0.1, 0.2]


def test_unknown_schedules_and_step_zero_are_refused():
    with pytest.raises(MooredError, match="did you mean 'cosine'"):
        lr_factor(1, 4, schedule="cosin")
    with pytest.raises(MooredError, match="counted from 1"):
        lr_factor(0, 4)
