"""`moored eval`: which options an evaluation takes."""

from __future__ import annotations

import pytest

from moored.cli import eval as command
from moored.config import Config, dump_config, load_config
from moored.errors import MooredError


class Asked(Exception):
    """Ends the command where it would load a model."""


def asked(monkeypatch, source: str, **options: object) -> Config:
    """The configuration that the command evaluates with."""
    seen = []

    def see(source: str, env: str | None, given: dict[str, object]) -> None:
        is_run = env is None
        seen.append(command._evaluation_config(source, env, given, is_run=is_run))
        raise Asked

    monkeypatch.setattr(command, "evaluate_source", see)
    with pytest.raises(Asked):
        command.eval_command(source, **options)  # pyright: ignore[reportArgumentType]
    return seen[0]


def test_a_run_is_evaluated_with_its_own_options_unless_others_are_given(tmp_path, monkeypatch):
    own = {"evaluation": {"num_tasks": 8, "temperature": 0.1}}
    rollout = {"rollout": {"max_response_tokens": 48}}
    (tmp_path / "config.yaml").write_text(dump_config(load_config({**own, **rollout})))
    found = asked(monkeypatch, str(tmp_path))
    assert (found.evaluation.num_tasks, found.evaluation.temperature) == (8, 0.1)
    assert found.rollout.max_response_tokens == 48
    found = asked(monkeypatch, str(tmp_path), num_tasks=3, temperature=0.0, max_tokens=5)
    assert (found.evaluation.num_tasks, found.evaluation.temperature) == (3, 0.0)
    assert found.rollout.max_response_tokens == 5


def test_a_model_of_few_positions_is_evaluated_on_dialogues_that_it_can_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 512}')
    found = asked(monkeypatch, str(tmp_path), env="bandit")
    assert (found.rollout.max_context, found.rollout.max_response_tokens) == (512, 256)
    found = asked(monkeypatch, str(tmp_path), env="bandit", max_tokens=64)
    assert (found.rollout.max_context, found.rollout.max_response_tokens) == (512, 64)


def test_a_model_that_looks_back_less_than_usual_is_evaluated_within_its_window(
    tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "sliding_window": 512}')
    found = asked(monkeypatch, str(tmp_path), env="bandit")
    assert (found.rollout.max_context, found.rollout.max_response_tokens) == (512, 256)


def test_a_hub_id_of_few_positions_is_too_once_it_was_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 512}')
    here = {"org/name": tmp_path}
    monkeypatch.setattr("moored.models.find.downloaded_folder", here.get)
    found = asked(monkeypatch, "org/name", env="bandit")
    assert (found.rollout.max_context, found.rollout.max_response_tokens) == (512, 256)
    found = asked(monkeypatch, "org/other", env="bandit")
    assert found.rollout.max_context == 2048


def test_replies_that_leave_a_model_no_room_for_a_prompt_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 512}')

    def config(reply: int) -> Config:
        given = {"rollout": {"max_response_tokens": reply}}
        return command._evaluation_config(str(tmp_path), "bandit", given, is_run=False)

    assert config(511).rollout.max_response_tokens == 511
    with pytest.raises(MooredError, match=r"--max-tokens 512 leaves no room .* in the 512 tokens"):
        config(512)


def test_a_model_is_evaluated_with_the_defaults(monkeypatch):
    found, defaults = asked(monkeypatch, "nano", env="bandit"), Config()
    assert found.evaluation.num_tasks == defaults.evaluation.num_tasks
    assert found.rollout.max_response_tokens == defaults.rollout.max_response_tokens
