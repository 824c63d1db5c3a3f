"""How the trainer fits into TRL: losses of other trainers, its signature, what it logs and says."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.trl_runs import FILTER, OWN, ROOT, distance, train, with_regularisers, write_thoughts

pytest.importorskip("trl")
# TRL and what it imports give warnings that are not about our code.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_offline")]


def test_gmpo_averages_over_kept_rows_whatever_its_loss_type_says(tmp_path):
    from trl.experimental.gmpo.gmpo_trainer import (  # pyright: ignore[reportMissingImports]
        GMPOTrainer,
    )

    from moored.integrations.trl import FilteredGRPOTrainer

    class FilteredGMPOTrainer(FilteredGRPOTrainer, GMPOTrainer):
        pass

    options: dict[str, Any] = with_regularisers("dapo") | {"entropy_coef": 0.0}
    plain = train(tmp_path, "K.", rows=4, trainer=GMPOTrainer, **options)
    options |= {"trainer": FilteredGMPOTrainer, "group_filter": FILTER}
    filtered = train(tmp_path, "KD", rows=8, **options)
    assert distance(filtered.gradients[0], plain.gradients[0]) < 1e-5


def make_trainer_with_own_loss() -> Any:
    from moored.integrations.trl import FilteredGRPOTrainer

    class RowMeanTrainer(FilteredGRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].shape[1]
            logps = self._get_per_token_logps_and_entropies(model, ids, seen, width)[0]
            mask = inputs["completion_mask"]
            mask = mask * inputs.get("tool_mask", torch.ones_like(mask))
            return -((logps * mask).sum(dim=1) * inputs["advantages"]).mean()

    return RowMeanTrainer


def test_a_loss_that_is_not_trls_is_refused_before_a_model_is_loaded():
    from moored.errors import MooredError

    with pytest.raises(MooredError, match="RowMeanTrainer overrides _compute_loss"):
        make_trainer_with_own_loss()(model="there is no such model", reward_funcs=[])


def test_a_loss_that_says_what_it_is_divided_by_is_scaled_to_its_kept_rows(tmp_path):
    kind = make_trainer_with_own_loss()
    plain = train(tmp_path, "K.", rows=4, trainer=kind, group_filter={"rule": "none"})
    options: dict[str, Any] = {"trainer": kind, "group_filter": FILTER, "loss_mean": "rows"}
    filtered = train(tmp_path, "KD", rows=8, **options)
    assert distance(filtered.gradients[0], plain.gradients[0]) < 1e-5


def test_the_signature_shows_the_parameters_of_trl_and_ours():
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    from moored.integrations.trl import FilteredGRPOTrainer

    theirs = inspect.signature(GRPOTrainer).parameters
    ours = inspect.signature(FilteredGRPOTrainer).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) == OWN
    assert all(ours[name] == parameter for name, parameter in theirs.items())
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OWN)
    assert ours["max_empty_generations"].default == 5


def test_every_parameter_of_ours_is_documented():
    assert documented_names() >= OWN


def test_every_logged_name_is_documented(tmp_path):
    from moored.integrations.trl import CollapseOptions

    watched = {"group_filter": FILTER, "collapse": CollapseOptions(), "rollout": write_thoughts}
    plain = train(tmp_path, "KD", rows=8)
    ours = train(tmp_path, "KD", rows=8, **watched)
    names = set().union(*ours.log) - set().union(*plain.log)
    found = {re.sub(r"@\d+$", "@k", name) for name in names}
    assert len(found) > 30
    assert found - documented_names() == set()


def documented_names() -> set[str]:
    """First cells of the tables on TRL; `…/name` has the prefix of the name before it."""
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = text.split("\n## TRL\n")[1].split("\n## ")[0]
    names: list[str] = []
    cells = "".join(re.findall(r"^\|[^|]*", section, re.MULTILINE))
    for name in re.findall(r"`([^`]+)`", cells):
        prefix = names[-1].rsplit("/", 1)[0] if names else ""
        names.append(name.replace("…", prefix) if name.startswith("…/") else name)
    return set(names)


def test_looks_that_cannot_be_made_are_told_once_and_counted(tmp_path, caplog):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {"group_filter": FILTER, "collapse": CollapseOptions(every=1)}
    # Fixed completions hold no tags, so no reasoning is found.
    with caplog.at_level(logging.WARNING, logger="moored"):
        run = train(tmp_path, "KK", rows=8, max_steps=4, **options)
    assert sum(row.get("collapse/num_skipped_views", 0.0) for row in run.log) == 4
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("collapse is not measured at step 1: ")
    assert last == "collapse could not be measured in 4 of 4 looks"


def test_collapse_is_measured_at_every_fifth_step_unless_told_otherwise(tmp_path):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {"group_filter": FILTER, "collapse": CollapseOptions()}
    run = train(tmp_path, "KK", rows=8, max_steps=6, rollout=write_thoughts, **options)
    assert [row["step"] for row in run.log if "collapse/measure_s" in row] == [1, 5]


def test_scoring_computes_each_prompt_once(tmp_path):
    from moored.integrations.trl import CollapseOptions
    from moored.types import Prompt, ScoreRequest

    watched = {"group_filter": FILTER, "collapse": CollapseOptions(batch_size=2)}
    trainer = train(tmp_path, "KD", rows=8, **watched).trainer
    num_tokens: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        num_tokens.append(kwargs["input_ids"].numel())

    trainer.model.model.register_forward_pre_hook(count, with_kwargs=True)
    rows = [np.array([8, 9]), np.array([10, 11]), np.array([14, 15]), np.array([16, 17])]
    trainer.score([ScoreRequest(Prompt(np.arange(5, 105)), rows)])
    # 99 tokens of the prompt; twice two rows of its last token and two of their own.
    assert num_tokens == [99, 6, 6]


def test_models_without_plain_keys_and_values_read_the_prompt_again(tmp_path, monkeypatch):
    from moored.integrations.trl import CollapseOptions
    from moored.types import Prompt, ScoreRequest

    watched = {"group_filter": FILTER, "collapse": CollapseOptions(batch_size=2)}
    trainer = train(tmp_path, "KD", rows=8, **watched).trainer
    rows = [np.array([8, 9]), np.array([10]), np.array([14, 15, 16])]
    requests = [ScoreRequest(Prompt(np.arange(5, 5 + length)), rows) for length in (1, 40)]
    shared = trainer.score(requests)
    monkeypatch.setattr("moored.integrations.trl_scoring.PLAIN_LAYERS", ())
    for ours, theirs in zip(shared, trainer.score(requests), strict=True):
        assert np.concatenate(ours) == pytest.approx(np.concatenate(theirs), abs=1e-5)


def write_template(prompts, trainer):
    """The same four reasonings after every prompt."""
    found = write_thoughts(prompts, trainer)
    ways = ("left", "right", "up", "down")
    texts = [f"<think>go {ways[row % 4]}</think>" for row in range(len(prompts))]
    found["completion_ids"] = [trainer.processing_class.encode(text) for text in texts]
    found["logprobs"] = [[0.0] * len(ids) for ids in found["completion_ids"]]
    return found


def test_a_verdict_of_collapse_is_told_once_with_its_sentence(tmp_path, caplog):
    from moored.integrations.trl import CollapseOptions

    options: dict[str, Any] = {"group_filter": FILTER, "collapse": CollapseOptions(every=1)}
    options |= {"rollout": write_template, "learning_rate": 0.0, "rows": 32, "max_steps": 4}
    with caplog.at_level(logging.WARNING, logger="moored"):
        run = train(tmp_path, "K" * 8, **options)
    verdicts = [row["collapse/is_collapsed"] for row in run.log if "loss" in row]
    assert verdicts[-1] == 1.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("collapsed at step ") and told[0].endswith(".")
