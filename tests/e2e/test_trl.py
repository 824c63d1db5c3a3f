"""The TRL integration with the real TRL, on the embedded nano model."""

from __future__ import annotations

import importlib
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.trl_runs import (
    FILTER,
    LOSSES,
    ROOT,
    TWO_PROCESSES,
    distance,
    reward_length,
    train,
    with_regularisers,
    write_dialogues,
    write_thoughts,
)
from tests.warm import WarmProcess, run_warm

pytest.importorskip("trl")
# TRL and what it imports give warnings that are not about our code.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_offline")]


@pytest.fixture(scope="module")
def kept_only(tmp_path_factory):
    """Gradient of plain TRL on the kept prompts alone, by loss type."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    def gradient(loss_type: str) -> dict[str, torch.Tensor]:
        if loss_type not in found:
            folder = tmp_path_factory.mktemp(loss_type)
            run = train(folder, "K.K", rows=8, **with_regularisers(loss_type))
            found[loss_type] = run.gradients[0]
        return found[loss_type]

    return gradient


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_is_that_of_the_kept_groups_alone(loss_type, kept_only, tmp_path):
    options: dict[str, Any] = with_regularisers(loss_type)
    filtered = train(tmp_path, "KDK", rows=12, group_filter=FILTER, **options)
    assert distance(filtered.gradients[0], kept_only(loss_type)) < 1e-5
    assert filtered.log[0]["filter/kept_fraction"] == pytest.approx(2 / 3)
    # 3 + 5 + 7 + 9 tokens per group
    assert (filtered.log[0]["tokens/trained"], filtered.log[0]["tokens/discarded"]) == (48, 24)


def test_dropped_groups_leave_a_trace_without_the_filter(kept_only, tmp_path):
    whole = train(
        tmp_path, "KDK", rows=12, group_filter={"rule": "none"}, **with_regularisers("grpo")
    )
    assert distance(whole.gradients[0], kept_only("grpo")) > 0.1


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_micro_batches_without_a_kept_row_do_not_count(loss_type, tmp_path):
    options: dict[str, Any] = with_regularisers(loss_type)
    plain = train(tmp_path, "K.", rows=1, accumulate=4, **options)
    filtered = train(tmp_path, "KD", rows=1, accumulate=8, group_filter=FILTER, **options)
    assert distance(filtered.gradients[0], plain.gradients[0]) < 1e-5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_several_updates_of_one_generation_average_to_the_kept_groups(loss_type, tmp_path):
    options: dict[str, Any] = with_regularisers(loss_type) | {
        "entropy_coef": 0.0,
        "learning_rate": 0.0,
    }
    plain = train(tmp_path, "K.K", rows=8, **options)
    options |= {"steps_per_generation": 3, "max_steps": 3}
    filtered = train(tmp_path, "KDK", rows=4, group_filter=FILTER, **options)
    steps = filtered.gradients
    mean = {name: torch.stack([step[name] for step in steps]).mean(0) for name in steps[0]}
    assert len(steps) == 3
    assert distance(mean, plain.gradients[0]) < 1e-5


@pytest.mark.parametrize(("scale", "factor"), [("linear", 2 / 3), ("sqrt", (2 / 3) ** 0.5)])
def test_the_loss_scale_multiplies_every_term(scale, factor, kept_only, tmp_path):
    options: dict[str, Any] = with_regularisers("dapo") | {"loss_scale": scale}
    scaled = train(tmp_path, "KDK", rows=12, group_filter=FILTER, **options)
    expected = {name: factor * x for name, x in kept_only("dapo").items()}
    assert distance(scaled.gradients[0], expected) < 1e-5


def test_observation_tokens_stay_masked_and_end_the_first_reply(tmp_path, monkeypatch):
    from moored.integrations.completions import group_completions
    from moored.integrations.trl import CollapseOptions

    replies: list[list[int]] = []

    def spy(prompts, completions, spans):
        replies.extend(completions)
        return group_completions(prompts, completions, spans)

    monkeypatch.setattr("moored.integrations.trl_collapse.group_completions", spy)
    options: dict[str, Any] = with_regularisers("dapo") | {"rollout": write_dialogues}
    plain = train(tmp_path, "K.K", rows=8, **options)
    options |= {"collapse": CollapseOptions(think_tags=None)}
    filtered = train(tmp_path, "KDK", rows=12, group_filter=FILTER, **options)
    assert distance(filtered.gradients[0], plain.gradients[0]) < 1e-5
    assert [len(reply) for reply in replies] == [2] * 12


def test_groups_are_ranked_by_their_weighted_raw_rewards(tmp_path):
    def noise(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    run = train(
        tmp_path,
        "KDK",
        rows=12,
        group_filter=FILTER,
        reward=[reward_length, noise],
        reward_weights=[1.0, 0.0],
        multi_objective_aggregation="normalize_then_sum",
    )
    assert run.log[0]["filter/num_kept"] == 2
    # rewards 0, 1, 0, 1
    assert run.log[0]["filter/score_max"] == 0.25


def test_without_a_rule_training_is_that_of_plain_trl(tmp_path):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {"rows": 8, "max_steps": 2, "rollout": None, "perturb": False}
    plain = train(tmp_path, "KD", **options)
    watched = CollapseOptions(every=1, think_tags=None)
    ours = train(tmp_path, "KD", group_filter={"rule": "none"}, collapse=watched, **options)
    assert all(torch.equal(ours.weights[name], x) for name, x in plain.weights.items())
    assert [row["loss"] for row in ours.log[:2]] == [row["loss"] for row in plain.log[:2]]
    assert ours.log[1]["collapse/valid_thinking_rate"] == 1.0


def test_an_update_without_a_kept_group_moves_nothing(tmp_path):
    options: dict[str, Any] = {"rows": 4, "group_filter": FILTER, "lr_scheduler_type": "constant"}
    first = train(tmp_path, "KD", max_steps=1, **options)
    both = train(tmp_path, "KD", max_steps=2, **options)
    assert [row.get("update/is_empty") for row in both.log[:2]] == [0.0, 1.0]
    assert all(torch.equal(both.weights[name], x) for name, x in first.weights.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_filter": {"rule": "top_q"}}, "unknown rule 'top_q'; did you mean 'top_p'?"),
        (
            {"group_filter": {"score": "length"}},
            "score 'length' is of the length of replies",
        ),
        ({"group_filter": {}, "loss_scale": "square"}, "unknown loss scale 'square'"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(options, message):
    from moored.errors import MooredError
    from moored.integrations.trl import FilteredGRPOTrainer

    with pytest.raises(MooredError, match=re.escape(message)):
        FilteredGRPOTrainer(model="there is no such model", reward_funcs=[], **options)


@pytest.mark.parametrize("by_place", [True, False])
def test_a_model_may_be_an_embedded_one_by_name(tmp_path, by_place):
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig

    from moored.integrations.trl import FilteredGRPOTrainer

    options = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4}
    more: dict[str, Any] = {} if by_place else {"model": "nano"}
    trainer = FilteredGRPOTrainer(
        *(["nano"] if by_place else []),
        reward_funcs=reward_length,
        args=GRPOConfig(str(tmp_path), per_device_train_batch_size=4, **options),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        **more,
    )
    assert trainer.model.config.vocab_size == 1024


def test_scores_are_those_of_a_plain_forward(tmp_path):
    from moored.integrations.trl import CollapseOptions
    from moored.types import Prompt, ScoreRequest

    watched = {"group_filter": FILTER, "collapse": CollapseOptions(batch_size=2)}
    trainer = train(tmp_path, "KD", rows=8, **watched).trainer
    prompt = Prompt(np.array([5, 6, 7]))
    rows = [np.array([8, 9]), np.array([10, 11, 12, 13]), np.array([14])]
    (found,) = trainer.score([ScoreRequest(prompt, rows)])
    for row, scored in zip(rows, found, strict=True):
        ids = torch.tensor([[*prompt.ids, *row]])
        with torch.no_grad():
            logp = trainer.model(ids).logits.log_softmax(-1)[0]
        expected = [float(logp[2 + k, token]) for k, token in enumerate(row)]
        assert scored == pytest.approx(expected, abs=1e-5)


def test_collapse_is_logged_at_the_first_step_and_every_few(tmp_path):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {
        "group_filter": FILTER,
        "collapse": CollapseOptions(every=2, num_prompts=2),
    }
    run = train(tmp_path, "KK", rows=8, max_steps=4, rollout=write_thoughts, **options)
    name = "collapse_first_turn_sample/mi_estimate"
    assert [row["step"] for row in run.log if name in row] == [1, 2, 4]
    # Two of three replies close their tag, 8 rows: the third and the sixth do not.
    assert run.log[0]["collapse/valid_thinking_rate"] == 6 / 8
    assert run.log[0]["collapse_first_turn_sample/mi_upper_bound"] == pytest.approx(np.log(2))
    assert run.log[0]["collapse/alarm"] == 0.0
    assert run.trainer.model.training


def test_a_resumed_run_goes_on_measuring_where_it_stopped(tmp_path):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {
        "group_filter": FILTER,
        "collapse": CollapseOptions(every=1),
        "rollout": write_thoughts,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    whole = train(tmp_path, "KK", rows=8, **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = train(tmp_path, "KK", rows=8, resume=checkpoint, **options)
    states = [run.trainer.collapse_monitor.state_dict() for run in (whole, resumed)]
    assert sum("collapse/measure_s" in row for row in whole.log) == 4
    assert states[0] == states[1]


def watched_run(**options):
    """Steps at which training was told to stop; MI falls to zero at the tenth of 20 looks."""
    from transformers import TrainerControl, TrainerState

    from moored.diagnostics import CollapseWatch, information
    from moored.integrations.trl import AlarmCallback

    watch = CollapseWatch()
    callback, control = AlarmCallback(watch, **options), TrainerControl()
    state, stopped_at = TrainerState(), []
    callback.on_train_begin(None, state, control)
    for step in range(1, 21):
        gap = 4.0 if step < 10 else 0.0
        watch.update(step, information(-2.0 - gap * (1 - np.eye(4)), range(4), np.ones(4)))
        callback.on_step_end(None, state, control)
        if control.should_training_stop:
            stopped_at.append(step)
    return stopped_at


def test_the_alarm_warns_once(caplog):
    assert watched_run() == []
    (step,) = re.findall(r"template_collapse at step (\d+)", caplog.text)
    assert 10 <= int(step) <= 14


def test_the_alarm_stops_the_run_if_asked_to():
    assert 10 <= watched_run(stop=True)[0] <= 14


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """Gradients and logs of two processes, told of each other as torchrun does."""
    folder = tmp_path_factory.mktemp("two")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    code = "from tests.e2e.trl_runs import several_processes; several_processes()"
    both = [
        WarmProcess(
            [folder],
            code=code,
            cwd=ROOT,
            env={**shared, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said[-3000:]
    return folder


@pytest.mark.parametrize("loss_type", TWO_PROCESSES["KDK"])
def test_two_processes_select_over_the_whole_batch(loss_type, two_processes, kept_only):
    # The dropped group lies on both processes, two rows on each.
    gradients, log = torch.load(two_processes / f"KDK_{loss_type}.pt")
    assert distance(gradients[0], kept_only(loss_type)) < 1e-5
    assert (log[0]["filter/num_groups"], log[0]["filter/num_kept"]) == (3, 2)
    assert (log[0]["tokens/trained"], log[0]["tokens/discarded"]) == (48, 24)


@pytest.mark.parametrize("loss_type", TWO_PROCESSES["KD"])
def test_a_process_without_a_kept_row_does_not_count(loss_type, two_processes, tmp_path):
    gradients, _ = torch.load(two_processes / f"KD_{loss_type}.pt")
    plain = train(tmp_path, "K.", rows=4, **with_regularisers(loss_type))
    assert distance(gradients[0], plain.gradients[0]) < 1e-5


def test_two_processes_measure_what_one_does(two_processes, tmp_path):
    from moored.integrations.trl import CollapseOptions

    watched = {"group_filter": FILTER, "collapse": CollapseOptions(think_tags=None)}
    one = train(tmp_path, "KDK", rows=12, **watched, **with_regularisers("grpo")).log[0]
    _, (two, *_) = torch.load(two_processes / "KDK_grpo.pt")
    names = [name for name in one if name.startswith("collapse_first_turn")]
    assert len(names) > 20
    assert [two[name] for name in names] == pytest.approx([one[name] for name in names], abs=1e-4)


def test_the_documented_examples_run(tmp_path):
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    with_trl, own_loop = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(with_trl.splitlines()) < 25
    logged = run_block(with_trl.replace("runs/trl", str(tmp_path)))
    assert logged.count("filter/kept_fraction") == 2
    assert logged.count("collapse_first_turn_sample/mi_estimate'") == 2
    lines = [line.split() for line in run_block(own_loop).splitlines()]
    # The model has not changed between the two steps.
    assert [line[0] for line in lines] == ["1", "2"]
    assert lines[0][1] == lines[1][1]


def run_block(code: str) -> str:
    done = run_warm([], code=code, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_trl_the_error_says_what_to_install(monkeypatch):
    for name in ("moored.integrations.trl", "moored.integrations.trl_collapse"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'moored[trl]'")):
        importlib.import_module("moored.integrations.trl")
