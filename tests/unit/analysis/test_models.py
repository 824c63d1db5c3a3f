"""Which model scores which step."""

from __future__ import annotations

import pytest

from moored.analysis.models import (
    START,
    Device,
    find_checkpoints,
    find_run,
    guess_model,
    late_model_warning,
    run_scorers,
)
from moored.analysis.scorers import Encoder, Scorer, Scorers
from moored.errors import ConfigError

SCORER = Scorer(name="toy", score=lambda requests: [], encoder=Encoder(None), shares_prompt=True)


def test_checkpoints_are_found_by_a_pattern_with_the_step_in_it(tmp_path):
    for name in ("checkpoint-500", "checkpoint-1000", "checkpoint-best", "checkpoint-7-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").write_text("a file")
    found = find_checkpoints(f"{tmp_path}/checkpoint-{{step}}")
    assert found == {step: f"{tmp_path}/checkpoint-{step}" for step in (500, 1000)}
    (tmp_path / "step_3" / "model").mkdir(parents=True)
    assert list(find_checkpoints(f"{tmp_path}/step_{{step}}/model")) == [3]


def test_the_checkpoints_of_a_trainer_are_found_beside_its_completions(tmp_path):
    (tmp_path / "completions").mkdir()
    with pytest.raises(ConfigError, match=r"--model 'out/checkpoint-\{step\}'"):
        guess_model([tmp_path])
    (tmp_path / "checkpoint-10").mkdir()
    pattern = str(tmp_path / "checkpoint-{step}")
    file = tmp_path / "completions" / "completions_00010.parquet"
    for path in (tmp_path, tmp_path / "completions", file):
        assert guess_model([path]) == pattern


def test_a_run_is_known_by_its_folder_and_by_its_rollout_files(tmp_path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).write_text("")
    file = run / "rollouts" / "step_000001.parquet"
    file.write_text("")
    assert find_run([run]) == find_run([file]) == find_run([file, run]) == run
    assert find_run([tmp_path]) is None and find_run([run, tmp_path]) is None


def test_one_model_for_several_steps_is_warned_about_in_one_line():
    one, many = Scorers.single(SCORER), Scorers("toy", 1.0, lambda _: SCORER, (1, 2))
    warning = late_model_warning(one, [1, 5, 9])
    assert warning is not None and "one model scores all steps, 1 to 9" in warning
    assert "\n" not in warning and "checkpoint-{step}" in warning
    assert late_model_warning(one, [1]) is None and late_model_warning(many, [1, 5]) is None


@pytest.mark.parametrize(("lag", "first"), [(0, 5), (1, 6)])
def test_a_checkpoint_scores_from_the_step_whose_replies_it_wrote(
    tmp_path, monkeypatch, lag, first
):
    config = f"engine: {{kind: ray}}\nmodel: nano\nrollout: {{max_lag: {lag}}}\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)

    def made(name, *, shown, weights=None, **options):
        return shown, weights and weights.name

    monkeypatch.setattr("moored.analysis.scorers.local_scorer", made)
    scorers = run_scorers(tmp_path, 1.0, Device("cpu", "float32"))
    assert scorers.steps == (1, first)
    assert scorers.at(first - 1) == (START, None)
    assert scorers.at(first) == ("checkpoint 4", "step_000004")
    assert scorers.name.endswith("checkpoint 4")
