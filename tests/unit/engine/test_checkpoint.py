"""Folders that are complete or absent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from moored.engine.checkpoint import newest_checkpoint, save_checkpoint
from moored.errors import RunLogError
from moored.runlog.log import written_whole

EXPORTED = ("model.safetensors", "config.json")


def write(final: Path, text: str) -> None:
    with written_whole(final) as folder:
        (folder / "file").write_text(text)


def test_a_folder_takes_the_place_of_the_old_one(tmp_path):
    write(tmp_path / "run" / "model", "old")
    write(tmp_path / "run" / "model", "new")
    assert (tmp_path / "run" / "model" / "file").read_text() == "new"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]


def test_others_can_read_weights_as_they_can_read_other_files(tmp_path):
    with written_whole(tmp_path / "model") as folder:
        save_file({"weight": np.zeros(2)}, folder / "model.safetensors")
        (folder / "model.safetensors").chmod(0o600)
        (folder / "config.json").write_text("{}")
    modes = [(tmp_path / "model" / name).stat().st_mode for name in EXPORTED]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("full")])
def test_a_failed_write_keeps_the_old_folder_and_leaves_nothing_behind(tmp_path, error):
    write(tmp_path / "model", "old")
    with (
        pytest.raises(RunLogError, match=r"cannot write .*model': (No space left|full)"),
        written_whole(tmp_path / "model") as folder,
    ):
        (folder / "file").write_text("half")
        raise error
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_kill_left_half_written_is_cleared_by_the_next_write(tmp_path):
    (tmp_path / ".writing_step_000003").mkdir()
    write(tmp_path / "step_000004", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000004"]


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(RunLogError, match="no checkpoint yet"):
        newest_checkpoint(tmp_path)


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    learner: Any = SimpleNamespace(save=lambda folder: None)
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, learner, {}, keep=3)
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000003", "step_000004", "step_000005"]
