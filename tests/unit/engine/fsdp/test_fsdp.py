"""FSDP2 with one rank, in this process: what does not need several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from moored.config import load_config
from moored.engine.fsdp import checkpoint
from moored.engine.fsdp.export import plain_twin
from moored.engine.fsdp.learner import ShardedLearner
from moored.engine.local.learner import LocalLearner
from moored.engine.lora import add_lora
from moored.errors import MooredError
from moored.training.batch import LossSample, Sample
from moored.types import Prompt, ScoreRequest


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_model(width: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=width,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


def sharded(*options: str, width: int = 16) -> ShardedLearner:
    counts = dist.new_group(backend="gloo")
    assert isinstance(counts, dist.ProcessGroup)
    config = load_config({"env": "bandit"}, ["algorithm.kl_coef=0.1", *options])
    mesh = init_device_mesh("cpu", (1,))
    return ShardedLearner(make_model(width), config, mesh=mesh, counts=counts, with_critic=True)


def alone(*options: str) -> LocalLearner:
    config = load_config({"env": "bandit"}, ["algorithm.kl_coef=0.1", *options])
    return LocalLearner(make_model(), config, with_critic=True)


def sample(*ids: int) -> LossSample:
    length = len(ids)
    return LossSample(
        sample=Sample(
            prompt=Prompt(np.array([1, 2])),
            ids_T=np.array(ids),
            loss_mask_T=np.ones(length, dtype=bool),
            old_logprobs_T=np.full(length, -2.0),
            turn_ends_T=np.arange(length) == length - 1,
            rewards_T=np.zeros(length),
            group=0,
            trajectory=0,
        ),
        advantages_T=np.ones(length),
        weights_T=np.full(length, 1.0 / length),
        mean_weights_T=np.full(length, 1.0 / length),
        returns_T=np.ones(length),
        old_values_T=np.zeros(length),
    )


def logprobs(learner: LocalLearner) -> np.ndarray:
    return learner.score([ScoreRequest(Prompt(np.array([1, 2])), [np.array([3, 4, 5])])])[0][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_update_is_that_of_one_process(dtype):
    one, other = sharded(f"engine.dtype={dtype}"), alone(f"engine.dtype={dtype}")
    for _ in range(3):
        (found,) = one.step([[sample(3, 4), sample(5, 6, 7)]])
        (wanted,) = other.step([[sample(3, 4), sample(5, 6, 7)]])
        # In bfloat16 norms are rounded as well.
        assert found == pytest.approx(wanted, rel=1e-5 if dtype == "float32" else 0.05, abs=0.02)
    near = 1e-5 if dtype == "float32" else 0.02
    assert logprobs(one) == pytest.approx(logprobs(other), abs=near)


def test_adapters_are_trained_when_the_first_pass_is_one_of_the_reference():
    # With KL an update begins with the reference, which is the model with adapters switched off.
    options = ["algorithm.kl_coef=0.1", "optimizer.lora_rank=4", "engine.dtype=bfloat16"]
    config = load_config({"env": "bandit"}, options)
    counts = dist.new_group(backend="gloo")
    assert isinstance(counts, dist.ProcessGroup)
    mesh = init_device_mesh("cpu", (1,))
    learner = ShardedLearner(add_lora(make_model(), config), config, mesh=mesh, counts=counts)
    (found,) = learner.step([[sample(3, 4)]])
    assert found["grad_norm"] > 0.0


def test_a_rank_without_samples_adds_nothing_but_takes_part():
    learner = sharded()
    batches = list(learner._pack([], [], []))
    assert batches == []
    learner._num_passes = lambda own: 1  # as if another rank had one pass
    (loss,) = learner._prepare([])
    parts = learner._add_up([loss])
    assert all(float(value) == 0.0 for value in parts.values())
    gradients = [gradient for trained in learner._trained for gradient in trained.gradients()]
    assert len(gradients) == sum(len(trained.weights) for trained in learner._trained)
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


def test_trained_weights_are_float32_and_passes_in_bfloat16_use_rounded_copies():
    learner = sharded("engine.dtype=bfloat16")
    assert {weight.dtype for weight in learner.model.parameters()} == {torch.float32}
    assert learner.reference is not None
    assert {weight.dtype for weight in learner.reference.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in learner.weights()} == {torch.bfloat16}


def test_scores_follow_weights_that_were_loaded(tmp_path):
    first, second = sharded(), sharded()
    list(first.step([[sample(3, 4)]]))
    before = logprobs(second)
    first.save(tmp_path)
    second.load(tmp_path)
    assert logprobs(second) == pytest.approx(logprobs(first), abs=1e-7)
    assert np.abs(logprobs(second) - before).max() > 1e-6
    assert second.version == 1


def test_one_process_and_a_rank_read_each_others_checkpoints(tmp_path):
    rank, process = sharded(), alone()
    list(rank.step([[sample(3, 4)]]))
    rank.save(tmp_path / "rank")
    process.load(tmp_path / "rank")
    process.save(tmp_path / "process")
    again = sharded()
    again.load(tmp_path / "process")
    scorer = alone()
    scorer.load(tmp_path / "rank", policy_only=True)
    for learner in (process, again, scorer):
        assert logprobs(learner) == pytest.approx(logprobs(rank), abs=1e-6)
    (found,), (wanted,) = (list(each.step([[sample(5, 6)]])) for each in (again, rank))
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    # The moments were there too: the same step leads to the same weights.
    assert logprobs(again) == pytest.approx(logprobs(rank), abs=1e-6)


def test_shards_that_other_ranks_wrote_elsewhere_are_missed_at_once(tmp_path, monkeypatch):
    def save_elsewhere(tensors, checkpoint_id, process_group):
        save(tensors, checkpoint_id=checkpoint_id, process_group=process_group)
        next(checkpoint_id.glob("*.distcp")).unlink()

    monkeypatch.setattr(checkpoint, "save", save_elsewhere)
    with pytest.raises(MooredError, match=r"not whole where rank 0 reads it .* they share"):
        sharded().save(tmp_path / "step")
    assert not (tmp_path / "step" / "version.json").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    sharded().save(tmp_path)
    with pytest.raises(MooredError, match=r"does not fit the model: \d+ weights differ"):
        sharded(width=32).load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone", "no contents"])
def test_a_torn_shard_is_found_before_any_weight_changes(tmp_path, damage):
    learner = sharded()
    list(learner.step([[sample(3, 4)]]))
    learner.save(tmp_path)
    list(learner.step([[sample(5, 6)]]))
    tear(tmp_path / "shards", damage)
    before = logprobs(learner)
    with pytest.raises(MooredError, match=r"is damaged or missing .*; delete the folder"):
        learner.load(tmp_path)
    assert np.array_equal(logprobs(learner), before)


def tear(shards: Path, damage: str) -> None:
    (file,) = shards.glob("*.distcp")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "gone":
        file.unlink()
    else:
        (shards / ".metadata").write_bytes(b"")


def test_a_twin_computes_what_the_sharded_model_does():
    learner = sharded()
    list(learner.step([[sample(3, 4)]]))
    cpu = torch.device("cpu")
    twin = plain_twin(learner.model, learner.exact_weights(), torch.float32, cpu)
    logits = twin(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0]
    wanted = torch.log_softmax(logits, dim=-1)[[1, 2, 3], [3, 4, 5]]
    assert logprobs(learner) == pytest.approx(wanted.numpy(), abs=1e-5)
    assert (
        plain_twin(learner.model, learner.exact_weights(), torch.float32, cpu, keeps=False) is None
    )
