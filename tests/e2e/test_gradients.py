"""Gradients measured while training and by `moored gradients`: nothing of the run changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moored.config import dump_config
from moored.errors import MooredError
from moored.runlog.log import read_records
from moored.train import build_run, resume, start, train
from tests.e2e.toys import HERE, toy_config, weights_of

OPTIONS = ["num_steps=5", "checkpoint_every=2", "rollout.group_size=4", "rollout.num_groups=6"]
OPTIONS += ["algorithm.entropy_coef=0.01", "algorithm.kl_coef=0.01", f"env={HERE}:Half"]
MEASURED = ["gradients.every=2", "gradients.num_buckets=3"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trained(folder: Path, model: Path, *overrides: str):
    run = build_run(toy_config(model, *OPTIONS, *overrides), folder)
    start(run)
    train(run)
    run.close()
    return run


@pytest.fixture(scope="module")
def grpo_run(toy_folder, tmp_path_factory) -> Path:
    """A finished run with checkpoints after steps 4 and 5."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gradients") / "run"
    trained(folder, toy_folder, "algorithm.name=grpo")
    return folder


@pytest.fixture
def a_run(grpo_run, tmp_path) -> Path:
    return Path(shutil.copytree(grpo_run, tmp_path / "run"))


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
def test_measuring_gradients_changes_no_number_of_a_run(name, toy_folder, tmp_path):
    algorithm = f"algorithm.name={name}"
    plain = trained(tmp_path / "plain", toy_folder, algorithm)
    measured = trained(tmp_path / "measured", toy_folder, algorithm, *MEASURED)
    files = [(tmp_path / run / "metrics.jsonl").read_bytes() for run in ("plain", "measured")]
    assert files[0] == files[1]
    for name, tensor in weights_of(plain).items():
        assert torch.equal(tensor, weights_of(measured)[name])
    records = read_records(tmp_path / "measured", "gradients")
    assert [record["step"] for record in records] == [1, 2, 4]
    assert not read_records(tmp_path / "plain", "gradients")


def test_all_groups_are_measured_whatever_the_filter_keeps(toy_folder, tmp_path):
    trained(tmp_path / "run", toy_folder, "algorithm.name=grpo", *MEASURED, "filter.value=0.5")
    kept = [r["filter/kept_fraction"] for r in read_records(tmp_path / "run")]
    assert min(map(float, map(str, kept))) < 1.0
    for record in read_records(tmp_path / "run", "gradients"):
        assert record["num_groups"] == 6
        sizes = [bucket["num_groups"] for bucket in record["buckets"]]  # pyright: ignore
        assert sizes == [2, 2, 2]
        lows = [bucket["rv_low"] for bucket in record["buckets"]]  # pyright: ignore
        assert lows == sorted(lows)


def test_a_resumed_run_has_the_gradients_of_one_that_never_stopped(toy_folder, tmp_path):
    options = ["algorithm.name=grpo", *MEASURED]
    trained(tmp_path / "whole", toy_folder, *options)
    config = toy_config(toy_folder, *OPTIONS, *options)
    start(first := build_run(config, tmp_path / "broken"))

    def interrupt(record) -> None:
        if record.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(first, interrupt)
    assert len(read_records(tmp_path / "broken", "gradients")) == 3
    resume(second := build_run(config, tmp_path / "broken", resume=True))
    train(second)
    for name in ("gradients.jsonl", "metrics.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_measured_afresh_gives_what_training_measures_in_the_next_step(
    toy_folder, tmp_path, here
):
    run = tmp_path / "run"
    options = ["num_steps=3", "gradients.every=3", "checkpoint_every=2", "gradients.num_buckets=3"]
    trained(run, toy_folder, "algorithm.name=ppo", *options)
    same = ["--checkpoint", "2", "--groups", "6", "--group-size", "4", "--buckets", "3"]
    found = json.loads(here("gradients", run, *same, "--json"))
    of_training = read_records(run, "gradients")[1]
    assert of_training["step"] == 3 and found["step"] == 2
    assert found["buckets"] == of_training["buckets"]
    assert found["whole"] == of_training["whole"]


def test_the_command_measures_the_newest_checkpoint_and_writes_beside_it(a_run, here):
    few = ["--groups", "4", "--group-size", "4", "--buckets", "2"]
    shown = here("gradients", a_run, *few, "--params", "last-block")
    assert "grpo at step 5: 4 groups of 4" in shown and "task SNR" in shown
    assert f"written to {a_run / 'gradients.jsonl'}" in shown
    (record,) = read_records(a_run, "gradients")
    assert record["step"] == 5 and record["params"] == "last-block"
    assert set(record) == {
        *("schema", "step", "algorithm", "params", "num_parameters", "num_groups", "group_size"),
        *("projection", "buckets", "whole"),
    }
    whole = record["whole"]
    assert isinstance(whole, dict) and set(whole["terms"]) == {"task", "kl", "entropy"}
    # The reference model is the one the run began with, not the checkpoint's.
    assert whole["terms"]["kl"]["norm"] > 0.0


def test_a_preset_is_measured_at_its_start_and_written_where_it_is_asked_for(
    toy_folder, tmp_path, here, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "toy.yaml"
    config.write_text(dump_config(toy_config(toy_folder, *OPTIONS, "algorithm.name=grpo")))
    few = ["--groups", "4", "--group-size", "4", "--buckets", "2"]
    shown = here("gradients", config, "algorithm.entropy_coef=0.5", *few, "-o", tmp_path / "out")
    assert "grpo at the start" in shown
    (record,) = read_records(tmp_path / "out", "gradients")
    assert record["step"] == 0
    here("gradients", config, *few)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "gradients.jsonl").exists()


def test_bad_input_is_refused_in_one_sentence_before_torch_is_asked(a_run, here, monkeypatch):
    monkeypatch.setattr("moored.engine.build.build_engine", lambda *_, **__: pytest.fail("built"))
    before = sorted(file.name for file in a_run.iterdir())
    for words, sentence in {
        ("--groups", "5"): "--groups 5 do not fill --buckets 6; give --groups 6 or more",
        ("--params", "first-block"): "unknown --params 'first-block'; did you mean 'last-block'?",
        ("--params", "lora"): "--params lora needs LoRA weights, but optimizer.lora_rank is 0",
        ("--checkpoint", "3"): "has no checkpoint of step 3; it has those of steps 4, 5",
        ("model=mini",): "model cannot change",
    }.items():
        shown = here("gradients", a_run, *words, expect=2)
        assert sentence in shown and shown.count("\n") == 1
    shown = here("gradients", "smoke", "--checkpoint", "3", expect=2)
    assert "--checkpoint 3 needs a run directory, got 'smoke'" in shown
    shutil.rmtree(a_run / "checkpoints")
    assert "has no checkpoint yet" in here("gradients", a_run, expect=2)
    assert sorted(f.name for f in a_run.iterdir()) == [n for n in before if n != "checkpoints"]


def test_an_engine_without_gradients_is_refused_before_the_first_step(
    toy_folder, tmp_path, monkeypatch
):
    closed: list[str] = []
    blind = SimpleNamespace(learner=object(), close=lambda: closed.append("engine"))
    monkeypatch.setattr("moored.train.build_engine", lambda _: blind)
    config = toy_config(toy_folder, *OPTIONS, *MEASURED)
    with pytest.raises(MooredError, match=r"cannot measure gradients; use engine\.kind=local"):
        build_run(config, tmp_path / "run")
    assert closed == ["engine"] and not (tmp_path / "run").exists()
