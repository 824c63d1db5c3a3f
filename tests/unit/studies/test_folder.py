"""The folder of a study: whose it is, and which runs have ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moored.config import dump_config
from moored.errors import ConfigError
from moored.models.find import embedded_models
from moored.runlog.log import STOPPED_EARLY
from moored.studies.declaration import PlannedRun, Study, plan_runs, read_study, restricted
from moored.studies.execute import train_command
from moored.studies.folder import StudyFolder, check_owner, check_runs


@pytest.fixture(scope="module")
def study() -> Study:
    return read_study("bottle")


@pytest.fixture(scope="module")
def runs(study) -> list[PlannedRun]:
    return plan_runs(study)


def begin(folder: Path, run: PlannedRun) -> None:
    (folder / run.name).mkdir(parents=True)
    (folder / run.name / "config.yaml").write_text(dump_config(run.config))


def test_how_runs_ended_is_remembered_and_their_seconds_add_up(tmp_path, study, runs):
    folder = StudyFolder(tmp_path / "a", study)
    folder.write_study(study, [])
    for run in runs[:3]:
        begin(folder.path, run)
    folder.note_end(runs[0], 1, 20.0)
    folder.note_end(runs[0], 0, 10.0)
    folder.note_end(runs[1], 2, 5.0)
    folder.note_end(runs[3], 2, 5.0)  # refused before it wrote its configuration
    begin(folder.path, runs[5])
    folder.note_end(runs[5], STOPPED_EARLY, 5.0)
    folder.close()
    folder = StudyFolder(tmp_path / "a", study)
    status = [folder.status(run) for run in runs[:5]]
    assert status == ["finished", "failed", "begun", "failed", "waiting"]
    assert folder.status(runs[5]) == "finished"
    assert folder.ended[runs[0].name].seconds == 30.0 and runs[2].name not in folder.ended
    assert folder.ended[runs[1].name].exit_code == 2


def test_the_folder_keeps_what_its_report_shows(tmp_path, study):
    folder = StudyFolder(tmp_path / "a", study)
    folder.write_study(study, [])
    folder.close()
    noted = json.loads((tmp_path / "a" / "study.json").read_text())
    assert noted["paper"] == study.paper and noted["report"] == list(study.report)
    assert noted["against"] == ["filter", "none"]


def test_a_finished_run_whose_folder_was_deleted_is_run_again(tmp_path, study, runs):
    folder = StudyFolder(tmp_path / "a", study)
    begin(folder.path, runs[0])
    folder.note_end(runs[0], 0, 1.0)
    (folder.run_folder(runs[0]) / "config.yaml").unlink()
    assert folder.status(runs[0]) == "waiting"


def test_the_folder_of_a_run_or_of_another_study_is_refused(tmp_path, study):
    StudyFolder(tmp_path / "a", study).write_study(study, [])
    check_owner(tmp_path / "a", restricted(study, ["filter=none"]))
    with pytest.raises(ConfigError, match="holds another study, 'bottle'"):
        StudyFolder(tmp_path / "a", read_study("filters"))
    with pytest.raises(ConfigError, match="holds another study"):
        check_owner(tmp_path / "a", study.model_copy(update={"factors": {"sieve": {}}}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match="a single run"):
        StudyFolder(tmp_path / "run", study)


def test_runs_with_other_options_than_planned_are_refused(tmp_path, study, runs):
    begin(tmp_path, runs[0])
    check_runs(tmp_path, runs)
    with pytest.raises(ConfigError, match="num_steps = 150, but the study now says 9"):
        check_runs(tmp_path, plan_runs(study, ["num_steps=9"]))


def test_runs_of_a_study_whose_model_was_moved_go_on_with_it(tmp_path, study, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(embedded_models()["nano"], "old/tuned")
    only = restricted(study, ["algorithm=grpo", "filter=none"])
    (run, *_) = plan_runs(only, ["model=old/tuned"])
    assert run.config.model == str(tmp_path / "old/tuned")
    folder = StudyFolder(Path("part"), only)
    begin(folder.path, run)
    assert train_command(folder, run)[-2:] == ["--resume", f"part/{run.name}"]
    shutil.copytree("old", "new")
    (run, *_) = plan_runs(only, ["model=new/tuned"])
    with pytest.raises(ConfigError, match="is a run with model = "):
        check_runs(folder.path, [run])  # it is another model: the old one is still there
    shutil.rmtree("old")
    check_runs(folder.path, [run])
    assert train_command(folder, run)[-1] == f'model="{tmp_path}/new/tuned"'
