"""Sampler and learner against plain forward passes of the same model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moored.config import load_config
from moored.engine.base import Event, HasEvents, Request, SamplingParams
from moored.engine.local import learner as local_learner
from moored.engine.local.engine import LocalEngine
from moored.engine.local.learner import LocalLearner
from moored.engine.local.sampler import LocalSampler
from moored.engine.packing import micro_batches, pack
from moored.engine.passes import OutOfMemoryError, compute_layers_twice
from moored.errors import MooredError
from moored.training.losses import gspo
from moored.training.samples import LossSample, build_samples, token_weights
from moored.types import Group, Prompt, ScoreRequest, StopReason, Trajectory, Turn
from tests.tiny_model import tiny_model

VOCABULARY = 64
STOPS = (1, 2)


def sharp_model(**options):
    return tiny_model(scale=4.0, **options)


def plain_logprobs(model, prompt: np.ndarray, reply: np.ndarray, temperature=1.0) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, reply]))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    return logp[np.arange(len(prompt) - 1, len(ids[0]) - 1), reply].numpy()


def dialogues(model, num=12, turns=3, max_tokens=10, temperature=1.0):
    """Multi-turn streams of unequal length: (prompt ids, completion) per turn."""
    rng = np.random.default_rng(0)
    sampler = LocalSampler(model)
    first = [rng.integers(3, VOCABULARY, size=length) for length in (5, 9, 14)]
    streams = [first[i % 3] for i in range(num)]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=STOPS)
    records = [[] for _ in range(num)]
    for turn in range(turns):
        requests = [
            Request(session=i, prompt=Prompt(s), seed=100 * turn + i) for i, s in enumerate(streams)
        ]
        for i, completion in enumerate(sampler.generate(requests, params)):
            records[i].append((streams[i], completion))
            seen = rng.integers(3, VOCABULARY, size=rng.integers(1, 6))
            streams[i] = np.concatenate([streams[i], completion.token_ids, seen])
    return records


@pytest.fixture(params=["tree", "mask"])
def attention(request, monkeypatch):
    """Both ways in which continuations share a prompt."""
    if request.param == "mask":
        monkeypatch.setattr(local_learner, "use_tree_attention", lambda *_, **__: False)
    return request.param


@pytest.mark.parametrize("row_tokens", [1, 24, 4096])
def test_scores_equal_concatenating_and_running_again(row_tokens, attention):
    model, rng = sharp_model(), np.random.default_rng(2)
    prompt = rng.integers(0, VOCABULARY, size=11)
    replies = [rng.integers(0, VOCABULARY, size=length) for length in (1, 2, 7, 15, 3)]
    learner = LocalLearner(
        model, load_config({"engine": {"row_tokens": row_tokens, "micro_batch_tokens": 64}})
    )
    (scored,) = learner.score([ScoreRequest(Prompt(prompt), replies)])
    for reply, logp in zip(replies, scored, strict=True):
        np.testing.assert_allclose(logp, plain_logprobs(model, prompt, reply), atol=1e-4)


def recorded_groups(model) -> list[Group]:
    """Three groups of four multi-turn trajectories with random rewards."""
    rng = np.random.default_rng(3)
    records = dialogues(model)
    groups = []
    for start in range(3):
        trajectories = []
        for index in range(start, 12, 3):
            turns = [
                Turn(
                    prompt=Prompt(prompt),
                    completion_ids=completion.token_ids,
                    logprobs=completion.logprobs,
                    reply="",
                    reward=float(rng.normal()),
                )
                for prompt, completion in records[index]
            ]
            trajectories.append(
                Trajectory(
                    env="toy",
                    task_seed=start,
                    episode_seed=index,
                    turns=tuple(turns),
                    stop=StopReason.DONE,
                )
            )
        groups.append(
            Group(group_id=start, env="toy", task_seed=start, trajectories=tuple(trajectories))
        )
    return groups


def ready_samples(model, how="token_mean") -> list[LossSample]:
    samples = build_samples(recorded_groups(model))
    rng = np.random.default_rng(4)
    found = []
    weights = token_weights(samples, how, max_length=10)
    shares = token_weights(samples, "token_mean", max_length=10)
    for sample, weights_T, shares_T in zip(samples, weights, shares, strict=True):
        zeros = np.zeros(len(sample.ids_T))
        advantages = np.where(sample.loss_mask_T, rng.normal(), 0.0)
        # An old policy that differs, so that ratios are not all one.
        other = sample.old_logprobs_T + 0.2 * rng.normal(size=len(zeros))
        found.append(
            LossSample(
                sample=replace(sample, old_logprobs_T=other),
                advantages_T=advantages,
                weights_T=weights_T,
                mean_weights_T=shares_T,
                returns_T=advantages,
                old_values_T=zeros,
            )
        )
    return found


def test_samples_hold_exactly_the_sampled_tokens_as_trained():
    model = sharp_model()
    groups = recorded_groups(model)
    trajectories = [t for group in groups for t in group.trajectories]
    samples = build_samples(groups)
    assert len(samples) == len(trajectories)
    for sample, trajectory in zip(samples, trajectories, strict=True):
        trained = sample.ids_T[sample.loss_mask_T]
        sampled = np.concatenate([turn.completion_ids for turn in trajectory.turns])
        np.testing.assert_array_equal(trained, sampled)
        assert sample.turn_ends_T.sum() == trajectory.num_turns
        assert sample.rewards_T.sum() == pytest.approx(trajectory.reward)
        whole = np.concatenate([sample.prompt.ids, sample.ids_T])
        last = trajectory.turns[-1]
        np.testing.assert_array_equal(whole, np.concatenate([last.prompt.ids, last.completion_ids]))


def test_a_rewritten_history_opens_a_new_sample():
    turns = [
        Turn(
            prompt=Prompt(np.array(prompt)),
            completion_ids=np.array([7, 8]),
            logprobs=np.zeros(2),
            reply="",
        )
        for prompt in ([3, 4], [3, 4, 7, 8, 5], [3, 9, 9, 9, 9, 9, 9, 9])
    ]
    trajectory = Trajectory(
        env="toy", task_seed=0, episode_seed=0, turns=tuple(turns), stop=StopReason.DONE
    )
    group = Group(group_id=0, env="toy", task_seed=0, trajectories=(trajectory,))
    first, second = build_samples([group])
    assert first.ids_T.tolist() == [7, 8, 5, 7, 8]
    assert first.loss_mask_T.tolist() == [True, True, False, True, True]
    assert second.prompt.ids.tolist() == [3, 9, 9, 9, 9, 9, 9, 9]
    assert first.trajectory == second.trajectory == 0


def test_errored_trajectories_are_not_trained():
    group = recorded_groups(sharp_model())[0]
    failed = Trajectory(
        env="toy",
        task_seed=0,
        episode_seed=9,
        turns=group.trajectories[0].turns,
        stop=StopReason.ENV_ERROR,
    )
    broken = Group(group_id=0, env="toy", task_seed=0, trajectories=(failed,))
    assert build_samples([broken]) == []


class CatchGradients(torch.optim.SGD):
    """Updates nothing, remembers the gradients."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.0)
        self._module = module
        self.caught: list[np.ndarray] = []

    def step(self, closure=None):
        self.caught = [
            p.grad.clone().numpy() for p in self._module.parameters() if p.grad is not None
        ]


def gradients(learner: LocalLearner, samples: list[LossSample]) -> list[np.ndarray]:
    catchers = [CatchGradients(trained.module) for trained in learner._trained]
    for trained, catcher in zip(learner._trained, catchers, strict=True):
        trained.optimizer = catcher
    next(learner.step([samples]))
    return [gradient for catcher in catchers for gradient in catcher.caught]


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "constant"])
def test_gradients_depend_on_neither_micro_batches_nor_packing(how, attention):
    results = []
    for micro, row in ((10_000, 10_000), (1, 1), (120, 60)):
        model = sharp_model()
        options = load_config(
            {
                "engine": {"micro_batch_tokens": micro, "row_tokens": row},
                "optimizer": {"grad_clip": 1e9},
                "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.05},
            }
        )
        learner = LocalLearner(model, options, with_critic=True)
        results.append(gradients(learner, ready_samples(model, how)))
    for other in results[1:]:
        assert len(other) == len(results[0]) > 20
        for mine, theirs in zip(other, results[0], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def clipped_losses(model, samples: list[LossSample], *, by_sequence: bool = False):
    """PPO's losses of the sampled tokens of each sample, in numpy."""
    found = []
    for given in samples:
        sample, mask = given.sample, given.sample.loss_mask_T
        log_ratio = plain_logprobs(model, sample.prompt.ids, sample.ids_T) - sample.old_logprobs_T
        log_ratio, advantages = log_ratio[mask], given.advantages_T[mask]
        ratio = np.exp(np.full_like(log_ratio, log_ratio.mean()) if by_sequence else log_ratio)
        gains = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
        found.append(-np.where(advantages < 0.0, np.maximum(gains, 3.0 * advantages), gains))
    return found


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_policy_loss_equals_numpy(how):
    model = sharp_model()
    samples = ready_samples(model, how)
    learner = LocalLearner(model, load_config({"optimizer": {"lr": 1e-12}}))
    losses = clipped_losses(model, samples)
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "seq_mean_token_mean": np.mean([own.mean() for own in losses]),
        "seq_mean_token_sum": np.mean([own.sum() for own in losses]),
    }[how]
    assert next(learner.step([samples]))["policy_loss"] == pytest.approx(expected, abs=1e-5)


def test_gspo_equals_numpy():
    model = sharp_model()
    samples = ready_samples(model)
    learner = LocalLearner(model, load_config({"optimizer": {"lr": 1e-12}}), loss=gspo)
    expected = np.concatenate(clipped_losses(model, samples, by_sequence=True)).mean()
    assert next(learner.step([samples]))["policy_loss"] == pytest.approx(expected, abs=1e-5)


def test_values_start_at_zero_and_learn():
    model = sharp_model()
    samples = ready_samples(model)
    learner = LocalLearner(model, load_config({"optimizer": {"critic_lr": 1e-2}}), with_critic=True)
    assert all((v == 0).all() for v in learner.values([given.sample for given in samples]))
    first = next(learner.step([samples]))["value_loss"]
    for _ in range(10):
        last = next(learner.step([samples]))["value_loss"]
    assert last < first


def test_the_last_value_is_that_of_the_whole_stream(attention):
    model = sharp_model()
    samples = [given.sample for given in ready_samples(model)]
    samples += [replace(samples[0], ids_T=samples[0].ids_T[:count]) for count in (0, 1)]
    options = load_config({"engine": {"micro_batch_tokens": 120}})
    learner = LocalLearner(model, options, with_critic=True)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight)
    longer = [replace(sample, ids_T=np.append(sample.ids_T, 5)) for sample in samples]
    for values, more in zip(learner.values(samples), learner.values(longer), strict=True):
        # Before the added token stands what was after the last one.
        np.testing.assert_allclose(values, more[:-1], atol=1e-4)
        assert np.ptp(more) > 0.1


def test_no_reference_model_exists_while_kl_is_off():
    assert LocalLearner(sharp_model()).reference is None
    assert (
        LocalLearner(sharp_model(), load_config({"algorithm": {"kl_coef": 0.1}})).reference
        is not None
    )
    with pytest.raises(MooredError, match="no critic"):
        LocalLearner(sharp_model()).values([])
    with pytest.raises(MooredError, match="at least one sample"):
        next(LocalLearner(sharp_model()).step([[]]))


def test_a_saved_learner_goes_on_bit_for_bit(tmp_path):
    def fresh() -> LocalLearner:
        options = load_config({"optimizer": {"lr": 1e-3, "critic_lr": 1e-3}})
        return LocalLearner(sharp_model(), options, with_critic=True)

    samples = ready_samples(sharp_model())
    whole, begun, resumed = fresh(), fresh(), fresh()
    for _ in range(4):
        next(whole.step([samples]))
    for _ in range(2):
        next(begun.step([samples]))
    begun.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    assert resumed.version == 2
    for _ in range(2):
        next(resumed.step([samples]))
    for (name, a), (_, b) in zip(whole.weights(), resumed.weights(), strict=True):
        assert torch.equal(a, b), name
    plain = [given.sample for given in samples]
    assert all(map(np.array_equal, whole.values(plain), resumed.values(plain)))


def test_a_learner_that_only_scores_takes_over_the_policy_and_refuses_updates(tmp_path):
    samples = ready_samples(sharp_model())
    options = load_config({"optimizer": {"lr": 1e-2}})
    trained = LocalLearner(sharp_model(), options)
    scoring = LocalLearner(sharp_model(), trains=False)
    next(trained.step([samples]))
    trained.save(tmp_path)
    scoring.load(tmp_path, policy_only=True)
    assert scoring.version == 1
    for (name, a), (_, b) in zip(trained.weights(), scoring.weights(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(MooredError, match="only scores"):
        next(scoring.step([samples]))


def test_rows_and_micro_batches_keep_their_bounds():
    prompts = [Prompt(np.arange(10)), Prompt(np.arange(10)), Prompt(np.arange(5))]
    rows = pack(prompts, [30, 30, 30], max_tokens=50)
    assert sorted(row.num_tokens for row in rows) == [35, 40, 40]
    shared = pack(prompts, [30, 30, 30], max_tokens=100)
    assert sorted(row.num_tokens for row in shared) == [35, 70]
    sizes = [[row.num_tokens for row in batch] for batch in micro_batches(rows, max_tokens=80)]
    assert sizes == [[40, 40], [35]]


def test_gradient_checkpointing_computes_layers_twice_and_changes_no_gradient():
    results, calls = [], []
    for checkpointing in (False, True):
        model = sharp_model()
        if checkpointing:
            compute_layers_twice(model)
        learner = LocalLearner(
            model, load_config({"optimizer": {"grad_clip": 1e9}}), with_critic=True
        )
        samples = ready_samples(model)
        assert learner.critic is not None
        counted = []
        for trunk in (model.model, learner.critic.trunk):
            # Before, not after: recomputing stops as soon as nothing more is needed.
            trunk.layers[0].mlp.register_forward_pre_hook(lambda *_, c=counted: c.append(1))  # pyright: ignore
        results.append(gradients(learner, samples))
        calls.append(len(counted))
    assert calls == [2, 4]
    for plain, again in zip(*results, strict=True):
        np.testing.assert_allclose(again, plain, atol=1e-5)


def test_dropout_is_off_in_updates_so_the_first_ratio_is_one():
    model = sharp_model(attention_dropout=0.5)
    samples = build_samples(recorded_groups(model))
    weights = token_weights(samples, "token_mean", max_length=10)
    given = [
        LossSample(
            sample=sample,
            advantages_T=np.ones(len(sample.ids_T)),
            weights_T=weights_T,
            mean_weights_T=weights_T,
        )
        for sample, weights_T in zip(samples, weights, strict=True)
    ]
    stats = next(LocalLearner(model.train()).step([given]))
    assert abs(stats["old_policy_kl"]) < 1e-6 and stats["clip_fraction"] == 0.0


def test_the_rate_factor_scales_both_rates_of_one_update():
    moves = []
    for factor in (1.0, 0.25):
        model = sharp_model()
        learner = LocalLearner(
            model,
            load_config({"optimizer": {"lr": 1e-3, "critic_lr": 1e-2, "grad_clip": 1e9}}),
            with_critic=True,
        )
        assert learner.critic is not None
        tensors = [model.model.norm.weight, learner.critic.head.bias]
        before = [tensor.detach().clone() for tensor in tensors]
        stats = next(learner.step([ready_samples(model)], lr_factor=factor))
        moves.append([tensor.detach() - old for tensor, old in zip(tensors, before, strict=True)])
        assert stats["lr"] == pytest.approx(1e-3 * factor)
    # The first step of Adam is the learning rate times the sign of the gradient.
    for whole, quarter in zip(*moves, strict=True):
        np.testing.assert_allclose(quarter, 0.25 * whole, rtol=1e-3)
        assert float(whole.abs().max()) > 5e-4


def test_a_critic_that_is_not_finite_holds_back_the_policy_too():
    model = sharp_model()
    learner = LocalLearner(model, load_config({"optimizer": {"lr": 1e-2}}), with_critic=True)
    samples = ready_samples(model)
    samples[0] = replace(samples[0], returns_T=np.full(len(samples[0].advantages_T), np.nan))
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    stats = next(learner.step([samples]))
    assert np.isnan(stats["value_loss"]) and np.isfinite(stats["policy_loss"])
    assert learner.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert np.isfinite(next(learner.step([ready_samples(model)]))["grad_norm"])


def test_a_reference_that_does_not_fit_is_told_in_a_sentence(monkeypatch):
    learner = LocalLearner(sharp_model(), load_config({"algorithm": {"kl_coef": 0.1}}))

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB")

    monkeypatch.setattr(learner, "_logprobs", fill)
    with pytest.raises(MooredError, match="out of GPU memory in scoring by the reference model"):
        learner.reference_logprobs([])


def crowded(learner: LocalLearner, monkeypatch, name: str, most: int) -> list[int]:
    """A GPU with memory for passes of `most` tokens; returns the tokens of those that are made."""
    compute, made = getattr(learner, name), []

    def pass_or_fill(packed, *rest, **options):
        tokens = getattr(packed, "packed", packed).input_ids.numel()
        if tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        made.append(tokens)
        return compute(packed, *rest, **options)

    monkeypatch.setattr(learner, name, pass_or_fill)
    return made


def test_an_update_that_runs_out_of_memory_is_done_again_in_smaller_micro_batches(monkeypatch):
    monkeypatch.setattr(local_learner, "LEAST_TOKENS", 8)

    def updated(tokens: int, most: int | None = None):
        model = sharp_model()
        options = load_config({"engine": {"micro_batch_tokens": tokens, "row_tokens": 32}})
        learner, events = LocalLearner(model, options), []
        learner.on_event = events.append
        if most is not None:
            crowded(learner, monkeypatch, "_add_gradients", most)
        samples = ready_samples(model)
        stats = list(learner.step([samples, samples[:6]]))
        return stats, dict(learner.weights()), events

    stats, weights, events = updated(800, most=130)
    same_stats, same_weights, none = updated(100)
    # 800, 400 and 200 tokens do not fit, and the updates are those of 100.
    assert [event.figures["micro_batch_tokens"] for event in events] == [400, 200, 100]
    assert all(event.kind == "micro_batch_halved" for event in events) and not none
    assert stats == same_stats
    assert all(torch.equal(weights[name], same) for name, same in same_weights.items())


def test_scoring_that_runs_out_of_memory_is_done_again_in_smaller_batches(monkeypatch):
    monkeypatch.setattr(local_learner, "LEAST_TOKENS", 8)
    model, rng = sharp_model(), np.random.default_rng(2)
    prompt, replies = rng.integers(0, VOCABULARY, size=11), rng.integers(0, VOCABULARY, (6, 9))
    learner = LocalLearner(model, load_config({"engine": {"micro_batch_tokens": 64}}))
    compute, tokens = local_learner.logprobs_pass, []

    def full(model, packed, **options):
        tokens.append(packed.input_ids.numel())
        if tokens[-1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return compute(model, packed, **options)

    monkeypatch.setattr(local_learner, "logprobs_pass", full)
    (scored,) = learner.score([ScoreRequest(Prompt(prompt), list(replies))])
    assert max(tokens[1:]) <= 40 < tokens[0]
    for reply, logp in zip(replies, scored, strict=True):
        np.testing.assert_allclose(logp, plain_logprobs(model, prompt, reply), atol=1e-4)


def test_what_no_micro_batch_fits_ends_with_the_options_that_help(monkeypatch):
    learner = LocalLearner(sharp_model(), load_config({"engine": {"micro_batch_tokens": 4096}}))
    made = crowded(learner, monkeypatch, "_add_gradients", 0)
    with pytest.raises(OutOfMemoryError, match=r"lower engine\.micro_batch_tokens"):
        next(learner.step([ready_samples(learner.model)]))
    assert not made
    assert all(weight.grad is None for weight in learner.model.parameters())


def test_a_run_is_told_of_smaller_micro_batches():
    engine = LocalEngine(load_config({"model": "nano", "engine": {"device": "cpu"}}))
    heard = []
    assert isinstance(engine, HasEvents)
    engine.on_event = heard.append
    event = Event(kind="micro_batch_halved", text="", figures={})
    engine.learner.on_event(event)
    engine.close()
    assert heard == [event]
