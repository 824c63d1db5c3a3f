"""Relative paths of a run mean files of the folder it was started in, wherever it is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moored.config import load_config
from moored.models.located import FOLDER, PLACE, about_folder, located, noted_folder


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with files and a run that was started there; the current one is another."""
    folder = tmp_path / "project"
    for name in ("runs/one", "tuned", "nano", "train", "data"):
        (folder / name).mkdir(parents=True)
    for name in ("rows.jsonl", "data/more.jsonl"):
        (folder / name).touch()
    note(folder / "runs/one", folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def note(run: Path, folder: Path, **more: str) -> None:
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"schema": 1, "step": 0, FOLDER: str(folder), **more}) + "\n")


def options_of(run: Path, **given: object) -> dict[str, object]:
    config = load_config({"env": {"name": "metamath", "options": given}})
    return located(config, run).env[0].options


def model_of(run: Path, name: str) -> str:
    return located(load_config({"model": name}), run).model


def test_files_of_the_start_are_found_from_elsewhere(project):
    run = project / "runs/one"
    assert model_of(run, "tuned") == str(project / "tuned")
    nested = {"files": ["rows.jsonl", "data/more.jsonl"]}
    assert options_of(run, source="rows.jsonl", options=nested) == {
        "source": str(project / "rows.jsonl"),
        "options": {"files": [str(project / "rows.jsonl"), str(project / "data/more.jsonl")]},
    }
    # An option of this name may be a folder of games.
    assert options_of(run, source="data") == {"source": str(project / "data")}


def test_they_come_before_files_of_the_same_name_here(project):
    Path("rows.jsonl").touch()
    run = project / "runs/one"
    assert options_of(run, source="rows.jsonl") == {"source": str(project / "rows.jsonl")}


def test_names_that_are_no_paths_stay(project, tmp_path):
    run, absolute = project / "runs/one", str(tmp_path / "elsewhere")
    for name in ("nano", "org/name", absolute):  # there is a folder `nano`, which is not meant
        assert model_of(run, name) == name
    given = {"split": "train", "size": 3, "source": "hub:org/rows", "text": "", "long": "x" * 9999}
    given |= {"home": "~nobody-of-this-name/rows.jsonl", "null": "a/\0"}
    assert options_of(run, **given) == given
    config = load_config({"env": "data.more:jsonl"})
    assert located(config, run).env == config.env


def test_in_the_folder_of_the_start_nothing_changes(project, monkeypatch):
    monkeypatch.chdir(project)
    assert model_of(Path("runs/one"), "tuned") == "tuned"
    assert options_of(Path("runs/one"), source="rows.jsonl") == {"source": "rows.jsonl"}


def test_a_moved_project_goes_by_the_current_folder_if_its_run_noted_no_place(
    project, tmp_path, monkeypatch
):
    moved = tmp_path / "moved"
    project.rename(moved)
    monkeypatch.chdir(moved)
    run = Path("runs/one")
    assert noted_folder(run) is None
    assert options_of(run, source="rows.jsonl") == {"source": "rows.jsonl"}
    # What resumes it notes the new folder, and a later start that one.
    assert about_folder(run, noted_folder(run)) == {FOLDER: str(moved), PLACE: "runs/one"}
    note(run, moved)
    monkeypatch.chdir(tmp_path)
    assert about_folder(moved / run, noted_folder(moved / run))[FOLDER] == str(moved)
    assert model_of(moved / run, "tuned") == str(moved / "tuned")


@pytest.mark.parametrize("place", ["runs/one", "link/one"])
def test_a_copied_or_moved_project_goes_by_its_own_files(project, tmp_path, monkeypatch, place):
    (project / "link").symlink_to("runs")
    run = project / place
    note(run, project, **{PLACE: place})
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, symlinks=True)
    assert model_of(copy / place, "tuned") == str(copy / "tuned")
    assert model_of(run, "tuned") == str(project / "tuned")
    # Inside the first one, by a path from here, and where the first one is gone.
    project.rename(copy / "inside")
    monkeypatch.chdir(copy)
    assert model_of(Path("inside", place), "tuned") == str(copy / "inside/tuned")
    assert noted_folder(Path(place)) == copy
    assert model_of(Path(place), "tuned") == "tuned"  # that is here


def test_a_run_that_was_copied_alone_goes_by_the_folder_of_its_start(project, tmp_path):
    note(project / "runs/one", project, **{PLACE: "runs/one"})
    shutil.copytree(project / "runs/one", tmp_path / "backup")
    assert model_of(tmp_path / "backup", "tuned") == str(project / "tuned")


def test_a_start_notes_where_its_run_lies_below_the_folder(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    assert about_folder(Path("runs/one")) == {FOLDER: str(project), PLACE: "runs/one"}
    assert about_folder(project / "runs/one")[PLACE] == "runs/one"
    assert about_folder(tmp_path / "outside") == {FOLDER: str(project)}
    monkeypatch.chdir(tmp_path / "elsewhere")
    noted = about_folder(project / "runs/one", project)
    assert noted == {FOLDER: str(project), PLACE: "runs/one"}


def test_a_folder_that_cannot_be_looked_at_counts_as_gone(project):
    """As in the home of another user; that of an overlong name raises even for root."""
    run = project / "runs/one"
    note(run, Path("/") / ("home" * 100))
    assert noted_folder(run) is None
    assert model_of(run, "tuned") == "tuned"


def test_a_run_that_notes_no_folder_is_read_as_before(project):
    (project / "runs/one/starts.jsonl").write_text('{"schema": 1, "step": 0}\n')
    assert model_of(project / "runs/one", "tuned") == "tuned"
    assert model_of(project / "runs/two", "tuned") == "tuned"
