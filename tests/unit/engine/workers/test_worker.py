"""One rank by itself: what it does besides computing."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist

from moored.config import load_config
from moored.engine.fsdp.trained import whole
from moored.engine.workers.ranks import Rank
from moored.engine.workers.worker import RankWorker
from moored.models.load import load_model


@pytest.fixture
def make(tmp_path):
    """A worker in a process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    config = load_config({"model": "nano", "engine": {"device": "cpu", "kind": "torchrun"}})

    def made(*options: str) -> RankWorker:
        chosen = load_config(config.model_dump(), list(options))
        return RankWorker(chosen, Rank(rank=0, size=1, local_rank=0, local_size=1))

    yield made
    dist.destroy_process_group()


def test_the_sampler_of_a_large_model_makes_room_for_updates(make, monkeypatch):
    assert make().learner.before_updates is None
    monkeypatch.setattr("moored.engine.local.parking.RELEASED_FROM", 1)
    worker = make()
    assert worker.learner.before_updates == worker.sampler.release


def test_the_sampler_has_the_weights_of_the_shards_and_none_of_their_memory(make):
    worker = make()
    shards = {whole(weight).data_ptr() for weight in worker.learner.model.parameters()}
    for name, weight in worker.learner.weights():
        view = worker.sampler.decoder._views.get(name)
        if view is not None:
            assert torch.equal(view, weight) and view.data_ptr() not in shards


@pytest.mark.parametrize("options", [[], ["optimizer.lora_rank=4"]])
def test_the_pass_that_checks_are_made_with_is_that_of_the_whole_model(make, options):
    ids = np.array([5, 6, 7, 8, 9])
    found = make(*options).plain_logprobs(ids[:2], ids[2:], False)
    model = load_model("nano", torch.device("cpu")).model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, 1:-1]
    wanted = torch.log_softmax(logits, dim=-1)[[0, 1, 2], ids[2:]]
    assert found == pytest.approx(wanted.numpy(), abs=1e-5)


def test_an_adapter_is_merged_into_its_base_by_rank_0(make, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    base = load_model("nano", torch.device("cpu")).model
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    described = tmp_path / "adapter" / "adapter_config.json"
    given = {**json.loads(described.read_text()), "base_model_name_or_path": "nano"}
    described.write_text(json.dumps(given))
    name = str(tmp_path / "adapter")
    wanted = load_model(name, torch.device("cpu")).model.state_dict()
    for key, weight in make(f"model={name}").learner.exact_weights():
        assert torch.equal(weight, wanted[key])
