"""Updates of several ranks, each a process, against those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.engine.local.learner import LocalLearner
from tests.unit.engine.fsdp.tiny import own_samples, prepare, trained_numbers
from tests.warm import ROOT, SCRIPT, WarmProcess

pytestmark = pytest.mark.cluster

ONE_UPDATE = Path(__file__).parent / "one_update.py"
FULL, LORA = ["algorithm.entropy_coef=0.01"], ["optimizer.lora_rank=2", "optimizer.grad_clip=0.01"]


def run_ranks(size: int, store: Path, *words: str) -> list[dict]:
    path = {"PYTHONPATH": str(ROOT)}
    ranks = [
        WarmProcess([ONE_UPDATE, str(rank), str(size), store, *words], code=SCRIPT, env=path)
        for rank in range(size)
    ]
    found = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, found
    return [json.loads(out) for out, _ in found]


@pytest.mark.parametrize("options", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("held", ["00", "01", "11"], ids=["layers", "gradients", "whole"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_fewer_samples_or_none_make_the_update_of_one_process(
    tmp_path, size, held, options
):
    model, config = prepare(*options)
    alone = LocalLearner(model, config, with_critic=True)
    wanted = [list(alone.step([own_samples()])) for _ in range(2)]
    weights = trained_numbers(alone, lambda weight: weight)
    for rank in run_ranks(size, tmp_path / "store", *held, *options):
        for found, one in zip(rank["stats"], wanted, strict=True):
            assert found[0] == pytest.approx(one[0], rel=1e-5, abs=1e-5)
        assert rank["weights"] == pytest.approx(weights, abs=1e-5)


@pytest.mark.parametrize("held", ["00", "01", "11"], ids=["layers", "gradients", "whole"])
def test_rounded_gradients_of_micro_batches_are_added_up_in_float32_on_ranks(tmp_path, held):
    model, config = prepare("engine.dtype=bfloat16")
    (wanted,) = LocalLearner(model, config, with_critic=True).step([own_samples()])
    for rank in run_ranks(2, tmp_path / "store", *held, "engine.dtype=bfloat16"):
        # Norms are rounded as well on ranks.
        assert rank["stats"][0][0] == pytest.approx(wanted, rel=0.02, abs=0.02)


def test_ranks_with_unequal_memory_decide_alike(tmp_path):
    # Alone the first would hold all whole, which is one part; with layers there are three.
    found = run_ranks(2, tmp_path / "store", "1000000000B", "1000B")
    assert [rank["parts"] for rank in found] == [3, 3]
    assert found[0]["weights"] == found[1]["weights"]
