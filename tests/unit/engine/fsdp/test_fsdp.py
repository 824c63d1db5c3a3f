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
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

from moored.config import load_config
from moored.engine.fsdp import checkpoint
from moored.engine.fsdp import learner as learner_file
from moored.engine.fsdp.export import plain_twin
from moored.engine.fsdp.learner import ShardedLearner
from moored.engine.fsdp.shard import layers_of
from moored.engine.fsdp.whole import Whole
from moored.engine.local.learner import LocalLearner
from moored.engine.lora import add_lora
from moored.engine.passes import Critic
from moored.errors import MooredError
from tests.unit.engine.fsdp.tiny import (
    MICRO,
    logprobs,
    make_model,
    own_samples,
    prepare,
    sample,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(*options: str, width: int = 16) -> ShardedLearner:
    counts = dist.new_group(backend="gloo")
    assert isinstance(counts, dist.ProcessGroup)
    config = load_config({"env": "bandit"}, ["algorithm.kl_coef=0.1", *options])
    mesh = init_device_mesh("cpu", (1,))
    return ShardedLearner(make_model(width), config, mesh=mesh, counts=counts, with_critic=True)


WAYS = {
    "in layers": Whole(weights=False, gradients=False),
    "gradients whole": Whole(weights=False, gradients=True),
    "all whole": Whole(weights=True, gradients=True),
}
in_every_way = pytest.mark.parametrize("way", WAYS)


def hold(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(learner_file, "held_whole", lambda *sizes, **more: WAYS[way])


def alone(*options: str) -> LocalLearner:
    config = load_config({"env": "bandit"}, ["algorithm.kl_coef=0.1", *options])
    return LocalLearner(make_model(), config, with_critic=True)


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


@in_every_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_give_the_same_update_however_gradients_are_held(monkeypatch, way, dtype):
    hold(monkeypatch, way)
    given = [sample(3, 4), sample(5, 6, 7), sample(8, 9)]
    one, other = sharded(f"engine.dtype={dtype}", *MICRO), alone(f"engine.dtype={dtype}", *MICRO)
    assert len(list(one._prepare(given))) == 3
    for _ in range(2):
        (found,), (wanted,) = one.step([given]), other.step([given])
        near = 1e-5 if dtype == "float32" else 0.05
        assert found == pytest.approx(wanted, rel=near, abs=near)
    near = 1e-5 if dtype == "float32" else 0.02
    assert logprobs(one) == pytest.approx(logprobs(other), abs=near)


@pytest.mark.parametrize(
    ("way", "sums"),
    # Policy and critic have two layers and a root each; three micro-batches.
    [("in layers", 2 * 3 * 3), ("gradients whole", 2 * 3), ("all whole", 2)],
)
def test_whole_gradients_are_summed_over_ranks_once_for_each_update(monkeypatch, way, sums):
    hold(monkeypatch, way)
    reduce, calls = param_group.foreach_reduce, []  # pyright: ignore[reportPrivateImportUsage]

    def count(*args, **kwargs):
        calls.append(args)
        return reduce(*args, **kwargs)

    monkeypatch.setattr(param_group, "foreach_reduce", count)
    (found,) = sharded(*MICRO).step([[sample(3, 4), sample(5, 6, 7), sample(8, 9)]])
    assert len(calls) == sums and found["grad_norm"] > 0.0


def interrupt(learner: ShardedLearner, where: str, at: int) -> None:
    """Let a micro-batch of an update fail, before its pass or in the middle of one."""
    compute, calls = learner._add_gradients, []

    def fail(*args):
        raise RuntimeError("no memory")

    def add_gradients(batch):
        calls.append(batch)
        if len(calls) < at:
            return compute(batch)
        if where == "before":
            fail()
        layer = next(layers_of(learner.model))
        hook = layer.register_forward_hook(
            fail if where == "forward" else lambda m, i, output: output.register_hook(fail) and None
        )
        try:
            return compute(batch)
        finally:
            hook.remove()

    learner._add_gradients = add_gradients
    with pytest.raises(RuntimeError, match="no memory"):
        list(learner.step([[sample(3, 4), sample(5, 6, 7), sample(8, 9)]]))
    learner._add_gradients = compute


@in_every_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("where", "at"), [("before", 2), ("forward", 1), ("forward", 2), ("backward", 2)]
)
def test_an_update_that_failed_halfway_leaves_no_gradient_behind(
    monkeypatch, way, dtype, where, at
):
    hold(monkeypatch, way)
    options = [f"engine.dtype={dtype}", *MICRO]
    one, other = sharded(*options), sharded(*options)
    interrupt(one, where, at)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-7)
    (found,), (wanted,) = (each.step([[sample(3, 4), sample(8, 9)]]) for each in (one, other))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-7)


@in_every_way
def test_an_update_with_a_number_that_is_not_finite_changes_nothing(monkeypatch, way):
    hold(monkeypatch, way)
    one, other = sharded(*MICRO), sharded(*MICRO)
    broken = sample(8, 9)
    broken.advantages_T[0] = np.inf
    (found,) = one.step([[sample(3, 4), broken]])
    assert not np.isfinite(found["policy_loss"]) and one.version == 0
    (found,), (wanted,) = (each.step([[sample(3, 4), sample(8, 9)]]) for each in (one, other))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-7)


def test_small_models_are_held_whole_and_large_ones_in_layers(monkeypatch):
    # Policy and critic, float32 weights and two float32 gradients of each parameter.
    size = 12 * sum(w.numel() for m in (make_model(), Critic(make_model())) for w in m.parameters())
    for memory, parts in ((size * 10, 1), (size * 10 - 10, 3)):
        monkeypatch.setattr(learner_file, "_memory_bytes", lambda *_, memory=memory: memory)
        learner = sharded()
        assert [len(each.parts) for each in learner._sharded.values()] == [parts] * 3


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


@pytest.mark.parametrize("options", [[], ["engine.dtype=bfloat16"], ["optimizer.lora_rank=2"]])
def test_a_sampler_gets_the_same_weights_at_once_as_one_by_one(monkeypatch, options):
    found = []
    for way in ("in layers", "all whole"):
        hold(monkeypatch, way)
        model, config = prepare(*options)
        counts = dist.new_group(backend="gloo")
        assert isinstance(counts, dist.ProcessGroup)
        mesh = init_device_mesh("cpu", (1,))
        learner = ShardedLearner(model, config, mesh=mesh, counts=counts)
        list(learner.step([own_samples()]))
        found.append(dict(learner.weights()))
    assert list(found[0]) == list(found[1]) and "lm_head.weight" in found[0]
    for name, tensor in found[0].items():
        assert tensor.dtype == found[1][name].dtype
        torch.testing.assert_close(tensor, found[1][name], rtol=0.0, atol=1e-6)


def test_weights_for_a_sampler_stay_as_they_are_when_the_learner_goes_on():
    learner = sharded()
    before = dict(learner.weights())
    kept = {name: tensor.clone() for name, tensor in before.items()}
    list(learner.step([[sample(3, 4)]]))
    for name, tensor in before.items():
        assert torch.equal(tensor, kept[name])


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
