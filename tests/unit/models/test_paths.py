"""Which options are paths, and become absolute."""

from __future__ import annotations

from pathlib import Path

import pytest

from moored.config import load_config
from moored.models.paths import resolve_paths
from moored.sft.options import load_sft_config


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The current folder, with files and folders in it."""
    for name in ("tuned", "nano", "train", "data"):
        (tmp_path / name).mkdir()
    for name in ("rows.jsonl", "data/more.jsonl", "data/my_env.py", "easy"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**given: object) -> dict[str, object]:
    return (
        resolve_paths(load_config({"env": {"name": "metamath", "options": given}})).env[0].options
    )


def test_files_and_folders_that_exist_become_absolute(project):
    config = load_config({"model": "tuned", "env": "data/my_env.py:Mine"})
    resolved = resolve_paths(config)
    assert resolved.model == str(project / "tuned")
    assert resolved.env[0].name == f"{project}/data/my_env.py:Mine"
    assert resolve_paths(resolved) == resolved
    given = {"files": ["rows.jsonl", "data/../data/more.jsonl"]}
    assert options(source="data", more=given) == {
        "source": str(project / "data"),  # an option of this name may be a folder
        "more": {"files": [str(project / "rows.jsonl"), str(project / "data/more.jsonl")]},
    }
    taught = resolve_paths(load_sft_config({"dialogues": "rows.jsonl"}))
    assert taught.dialogues == str(project / "rows.jsonl")


def test_what_is_no_path_stays(project):
    for name in ("nano", "org/name", "tuned/gone"):  # there is a folder `nano`, which is not meant
        assert resolve_paths(load_config({"model": name})).model == name
    # A folder and a file have the names of a split and of a level, which are no paths.
    given = {"split": "train", "level": "easy", "size": 3, "source": "hub:org/rows", "text": ""}
    given |= {"long": "x" * 9999, "home": "~/rows.jsonl", "null": "a/\0", "nothing": None}
    assert options(**given) == given
    config = load_config({"env": "data.my_env:Mine", "algorithm": {"name": "mine:SIGN"}})
    assert resolve_paths(config) == config
