"""Updates of TRL that the filter leaves without anything to train on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.e2e.trl_runs import FILTER, train

pytest.importorskip("trl")
# TRL and what it imports give warnings that are not about our code.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_offline")]

ONE_PROMPT: dict[str, Any] = {"rows": 4, "group_filter": FILTER, "lr_scheduler_type": "constant"}
"""A generation is one prompt: K gives an update, D an empty one."""
ADAPTIVE: dict[str, Any] = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.02,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 0.04,
    "entropy_coef_min": 0.0,
    "entropy_target": 0.1,
}
"""The model's entropy is far above the target, so the coefficient falls at every real update."""


def logged(run: Any, name: str) -> list[float | None]:
    return [row.get(name) for row in run.log if "loss" in row]


def test_an_update_without_a_kept_group_moves_nothing(tmp_path):
    first = train(tmp_path, "KD", max_steps=1, **ONE_PROMPT)
    both = train(tmp_path, "KD", max_steps=2, **ONE_PROMPT)
    assert logged(both, "update/is_empty") == [0.0, 1.0]
    assert all(torch.equal(both.weights[name], x) for name, x in first.weights.items())


def test_the_adaptive_entropy_controller_does_not_see_empty_updates(tmp_path):
    run = train(tmp_path, "KD", max_steps=4, **ADAPTIVE, **ONE_PROMPT)
    assert logged(run, "update/is_empty") == [0.0, 1.0, 0.0, 1.0]
    assert logged(run, "entropy_coef") == pytest.approx([0.015, 0.015, 0.01, 0.01])
    assert run.trainer._last_world_entropy == pytest.approx(logged(run, "entropy")[2])


def test_the_controller_sees_a_window_of_which_a_part_is_empty(tmp_path):
    options = {"rows": 2, "accumulate": 4, "group_filter": FILTER, "max_steps": 2}
    run = train(tmp_path, "KD", **ADAPTIVE, **options)
    assert logged(run, "update/is_empty") == [0.0, 0.0]
    assert logged(run, "entropy_coef") == pytest.approx([0.015, 0.01])


def test_entropy_is_averaged_over_updates_that_have_tokens(tmp_path):
    each = train(tmp_path, "KD", max_steps=4, beta=0.1, **ONE_PROMPT)
    means = train(tmp_path, "KD", max_steps=4, beta=0.1, logging_steps=4, **ONE_PROMPT)
    first, nothing, second, nothing_again = logged(each, "entropy")
    assert nothing is None and nothing_again is None
    assert first is not None and second is not None and first > 1.0
    (mean,) = logged(means, "entropy")
    assert mean == pytest.approx((first + second) / 2)
    assert logged(each, "kl")[1] is None


def test_micro_batches_without_tokens_stay_out_of_the_averages(tmp_path):
    # One row a micro-batch: of 8 in an update, the 4 of the dropped prompt have no token.
    options: dict[str, Any] = {"learning_rate": 0.0, "rows": 1}
    plain = train(tmp_path, "K.", accumulate=4, **options)
    filtered = train(tmp_path, "KD", accumulate=8, group_filter=FILTER, **options)
    assert logged(filtered, "entropy") == pytest.approx(logged(plain, "entropy"), abs=1e-5)


def test_no_number_is_logged_as_none(tmp_path):
    run = train(tmp_path, "KD", max_steps=2, **ONE_PROMPT)
    assert [name for row in run.log for name, value in row.items() if value is None] == []
    assert logged(run, "clip_ratio/low_min") == [0.0, None]
    assert "clip_ratio/low_min" not in run.log[1]


def test_generations_are_counted_not_the_updates_they_serve(tmp_path, caplog):
    options = {"max_empty_generations": 2, "stop_when_empty": True, "num_iterations": 5}
    with caplog.at_level(logging.WARNING, logger="moored"):
        run = train(tmp_path, "KDK", max_steps=15, **options, **ONE_PROMPT)
    assert sum(map(bool, logged(run, "update/is_empty"))) == 5
    assert run.trainer.state.global_step == 15
    assert caplog.text == ""


def test_empty_generations_end_the_run_if_asked_to_and_say_why(tmp_path, caplog):
    options = {"max_empty_generations": 2, "stop_when_empty": True, "num_iterations": 2}
    with caplog.at_level(logging.WARNING, logger="moored"):
        run = train(tmp_path, "KDDK", max_steps=8, **options, **ONE_PROMPT)
    # Two updates of each generation; the second empty one begins with the fifth.
    assert run.trainer.state.global_step == 5
    assert "2 generations in a row had nothing to train on" in caplog.text
    assert "training stops" in caplog.text


def test_a_second_call_of_train_counts_anew(tmp_path):
    options = {"max_empty_generations": 2, "stop_when_empty": True}
    trainer = train(tmp_path, "DDD", max_steps=6, **options, **ONE_PROMPT).trainer
    assert trainer.state.global_step == 2
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_resumed_run_goes_on_counting_empty_generations(tmp_path):
    options: dict[str, Any] = {"max_empty_generations": 3, "stop_when_empty": True, "max_steps": 6}
    options |= {"save_strategy": "steps", "save_steps": 2} | ONE_PROMPT
    assert train(tmp_path, "D", **options).trainer.state.global_step == 3
    resumed = train(tmp_path, "D", resume=str(tmp_path / "checkpoint-2"), **options)
    assert resumed.trainer.state.global_step == 3


def test_by_default_an_empty_run_goes_on_and_says_so_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="moored"):
        run = train(tmp_path, "D", max_steps=8, **ONE_PROMPT)
    assert run.trainer.state.global_step == 8
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("5 generations in a row had nothing to train on")
    assert "training goes on" in first
    assert last == "8 of 8 generations had nothing to train on"


def test_an_update_is_empty_when_its_kept_rows_have_no_loss_token(tmp_path):
    # No completion ends itself, so that TRL masks all of them.
    options = {"mask_truncated_completions": True, "weight_decay": 0.5}
    before = train(tmp_path, "K", learning_rate=0.0, **options, **ONE_PROMPT)
    run = train(tmp_path, "K", **options, **ONE_PROMPT)
    assert logged(run, "filter/num_kept") == [1.0]
    assert logged(run, "update/is_empty") == [1.0]
    assert all(torch.equal(run.weights[name], x) for name, x in before.weights.items())
