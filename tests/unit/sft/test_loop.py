"""The loop: it learns, goes on exactly where it stopped, and measures what it says."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest

from moored.errors import ConfigError, MooredError
from moored.runlog.log import read_records
from moored.sft.options import load_sft_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402

from moored.engine.local.engine import LocalEngine  # noqa: E402
from moored.sft.ahead import LessonsAhead  # noqa: E402
from moored.sft.loop import build_sft, measure, resume_sft, run_sft, start_sft  # noqa: E402

LESSONS = "tests.unit.sft.lessons"
SMALL = {"num_tasks": 8, "num_dialogues": 4, "max_response_tokens": 16}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def options(folder, **more):
    data = {
        "model": str(folder),
        "env": f"{LESSONS}:Taught",
        "num_steps": 6,
        "batch_tokens": 128,
        "checkpoint_every": 2,
        "evaluation": SMALL,
    }
    return load_sft_config({**data, **more})


def run_to_end(config, folder):
    run = build_sft(config, folder)
    start_sft(run)
    reason = run_sft(run)
    run.close()
    return reason


def records_of(folder) -> list[dict[str, Any]]:
    return read_records(folder)


def weights(folder) -> dict:
    return load_file(folder / "model" / "model.safetensors")


def test_a_random_model_learns_to_reply_in_the_asked_form(tiny_folder, tmp_path):
    config = options(
        tiny_folder,
        num_steps=60,
        batch_tokens=512,
        optimizer={"lr": 0.01, "warmup_steps": 5},
        evaluation={**SMALL, "num_tasks": 32, "every": 30},
    )
    assert run_to_end(config, tmp_path / "run") == "all 60 steps done"
    records = records_of(tmp_path / "run")
    measured = [record for record in records if "evaluation/loss" in record]
    assert [record["step"] for record in measured] == [0, 30, 60]
    before, _, after = measured
    assert before["evaluation/validity_rate"] < 0.1 and after["evaluation/validity_rate"] > 0.9
    # 21 words at random: log 21 = 3.04 nats.
    assert before["evaluation/loss"] == pytest.approx(3.04, abs=0.1)
    assert after["evaluation/loss"] < 0.5
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert saved.config.model_type == "llama"
    transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_that_stopped_ends_with_the_same_weights_and_log(tiny_folder, tmp_path, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    config = options(
        tiny_folder, optimizer={"lora_rank": lora_rank}, evaluation={**SMALL, "every": 2}
    )
    run_to_end(config, tmp_path / "whole")
    first = build_sft(config, tmp_path / "stopped")
    start_sft(first)
    assert run_sft(first, lambda record: record.step == 3) == "stopped on request after step 3"
    first.close()
    # Step 4 was logged, then the process was killed: it is done again.
    first.log.append("metrics", 4, {"train/loss": 0.0})
    second = build_sft(config, tmp_path / "stopped", resume=True)
    resume_sft(second)
    assert second.next_step == 4
    assert run_sft(second) == "all 6 steps done"
    for file in ("metrics.jsonl", "config.yaml"):
        whole, stopped = (tmp_path / name / file for name in ("whole", "stopped"))
        assert whole.read_bytes() == stopped.read_bytes()
    whole, stopped = (weights(tmp_path / name) for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_a_finished_run_that_is_resumed_starts_no_workers(tiny_folder, tmp_path):
    config = options(tiny_folder, num_steps=1)
    run_to_end(config, tmp_path / "run")
    again = build_sft(config.model_copy(update={"workers": 1}), tmp_path / "run", resume=True)
    resume_sft(again)
    assert run_sft(again) == "the only step is done"
    assert isinstance(again.lessons, LessonsAhead) and not again.lessons._chunks
    again.close()


def test_a_run_killed_before_its_first_checkpoint_begins_again(tiny_folder, tmp_path):
    config = options(tiny_folder, num_steps=2)
    run_to_end(config, tmp_path / "whole")
    killed = build_sft(config, tmp_path / "killed")
    start_sft(killed)
    killed.log.append("metrics", 0, {"evaluation/loss": 9.0})
    killed.log.append("metrics", 1, {"train/loss": 9.0})
    again = build_sft(config, tmp_path / "killed", resume=True)
    resume_sft(again)
    run_sft(again)
    whole, killed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_a_run_stopped_before_its_first_step_leaves_no_model_and_goes_on(tiny_folder, tmp_path):
    config = options(tiny_folder, num_steps=2)
    run = build_sft(config, tmp_path)
    start_sft(run)
    assert run_sft(run, lambda record: True) == "stopped on request before the first step"
    assert not (tmp_path / "model").exists()
    again = build_sft(config, tmp_path, resume=True)
    resume_sft(again)
    assert run_sft(again) == "all 2 steps done"
    assert [record["step"] for record in records_of(tmp_path)] == [0, 1, 2]


def test_a_finished_run_that_lost_its_model_writes_it_again(tiny_folder, tmp_path):
    config = options(tiny_folder, num_steps=2)
    run_to_end(config, tmp_path)
    before = weights(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    again = build_sft(config, tmp_path, resume=True)
    resume_sft(again)
    assert run_sft(again) == "all 2 steps done"
    assert all(torch.equal(before[name], weights(tmp_path)[name]) for name in before)


def test_lora_trains_few_weights_and_exports_a_plain_model(tiny_folder, tmp_path):
    pytest.importorskip("peft")
    run = build_sft(options(tiny_folder, optimizer={"lora_rank": 4, "lr": 0.01}), tmp_path)
    start_sft(run)
    run_sft(run)
    model = cast(LocalEngine, run.engine).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names and all("lora_" in name for name in names)
    losses = [r["train/loss"] for r in records_of(tmp_path) if "train/loss" in r]
    assert losses[-1] < losses[0]
    base = load_file(tiny_folder / "model.safetensors")
    merged = weights(tmp_path)
    assert merged.keys() == base.keys()
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert changed and not any("norm" in name or "embed" in name for name in changed)


def test_dialogues_of_a_file_are_learnt_and_tried_on_an_environment(tiny_folder, tmp_path):
    file = tmp_path / "dialogues.jsonl"
    rows = [{"prompt": f"Letter {x}.", "completion": f"Letter {x}."} for x in "ABCD"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = options(tiny_folder, dialogues=str(file), optimizer={"lr": 0.01})
    run_to_end(config, tmp_path / "run")
    first, *_, last = records_of(tmp_path / "run")
    assert last["evaluation/loss"] < first["evaluation/loss"]
    assert "evaluation/success_rate" in last
    run_to_end(options(tiny_folder, dialogues=str(file), env=[]), tmp_path / "alone")
    assert "evaluation/success_rate" not in records_of(tmp_path / "alone")[-1]


def test_held_out_dialogues_that_are_too_long_are_named_instead_of_a_loss(
    tiny_folder, tmp_path, caplog
):
    file = tmp_path / "dialogues.jsonl"
    rows = [{"prompt": f"Letter {x}.", "completion": f"Letter {x}." * 40} for x in "ABCD"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"num_dialogues": 4, "max_response_tokens": 16}
    config = options(tiny_folder, dialogues=str(file), env=[], max_context=64, evaluation=small)
    run = build_sft(config, tmp_path / "run")
    with caplog.at_level("WARNING", logger="moored.sft.loop"):
        assert measure(run) == {}
    run.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "there is no held-out loss: no reply of the held-out dialogues fits into max_context = "
        "64 tokens; raise it (to 512 at most), or choose shorter dialogues"
    )


def test_dialogues_that_are_all_the_same_leave_no_held_out_loss_and_that_is_said(
    tiny_folder, tmp_path, caplog
):
    file = tmp_path / "dialogues.jsonl"
    file.write_text(json.dumps({"prompt": "Letter A.", "completion": "Letter A."}) + "\n")
    for asked in (4, 0):
        evaluation = {"num_dialogues": asked, "max_response_tokens": 16}
        config = options(tiny_folder, dialogues=str(file), env=[], evaluation=evaluation)
        run = build_sft(config, tmp_path / f"run-{asked}")
        caplog.clear()
        with caplog.at_level("WARNING", logger="moored.sft.loop"):
            assert measure(run) == {}
        run.close()
        said = [record.getMessage() for record in caplog.records]
        assert bool(asked) == ("all dialogues are the same" in " ".join(said))


def test_a_run_does_not_go_on_with_a_file_that_was_edited(tiny_folder, tmp_path):
    file, folder = tmp_path / "dialogues.jsonl", tmp_path / "run"
    rows = [{"prompt": f"Letter {x}.", "completion": f"Letter {x}."} for x in "ABCD"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text)
    config = options(tiny_folder, dialogues=str(file), env=[])
    stopped = build_sft(config, folder)
    start_sft(stopped)
    run_sft(stopped, lambda record: record.step == 3)
    stopped.close()

    def resumed_at() -> int:
        run = build_sft(config, folder, resume=True)
        try:
            resume_sft(run)
            return run.next_step
        finally:
            run.close()

    assert resumed_at() == 4
    file.write_text(text.replace("D", "E"))
    with pytest.raises(ConfigError, match=r"jsonl' were edited since the warm start began, so it"):
        resumed_at()
    file.write_text(text)
    assert resumed_at() == 4
    # A run of an earlier version noted nothing; it does from now on.
    (folder / "starts.jsonl").unlink()
    file.write_text(text.replace("D", "E"))
    assert resumed_at() == 4
    file.write_text(text)
    with pytest.raises(ConfigError, match="were edited"):
        resumed_at()


def test_the_rate_warms_up_and_falls_as_the_options_say(tiny_folder, tmp_path):
    optimizer = {"lr": 0.01, "schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}
    none = {"num_tasks": 0, "num_dialogues": 0}
    run_to_end(options(tiny_folder, optimizer=optimizer, evaluation=none), tmp_path)
    steps = [record for record in records_of(tmp_path) if record["step"]]
    rates = [record["train/lr"] for record in steps]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.008, 0.006, 0.004])
    assert np.all([record["train/num_tokens"] <= 128 for record in steps])


def test_a_model_whose_context_shows_only_once_it_is_loaded_is_checked_then(
    tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("moored.sft.options.description_of", lambda model: {})
    with pytest.raises(ConfigError, match="max_context = 2048 is longer than the 512 tokens"):
        build_sft(options(tiny_folder), tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(tiny_folder, tmp_path):
    run = build_sft(options(tiny_folder), tmp_path)
    start_sft(run)
    with torch.no_grad():
        cast(LocalEngine, run.engine).model.get_input_embeddings().weight.fill_(float("inf"))
    run.config = run.config.model_copy(
        update={"evaluation": run.config.evaluation.model_copy(update={"num_tasks": 0})}
    )
    with pytest.raises(MooredError, match="step 1: the loss or its gradient is not finite"):
        run_sft(run)
