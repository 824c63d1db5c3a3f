"""The run directory survives kills, full disks and resumes."""

from __future__ import annotations

import errno
import json
import math
import os
import threading

import numpy as np
import pytest

from moored.errors import RunLogError
from moored.runlog.log import (
    SCHEMA,
    RunLog,
    check_folder,
    read_records,
    replacing,
    write_atomically,
)


def test_records_come_back_in_order_with_schema_and_step(tmp_path):
    log = RunLog(tmp_path / "run")
    log.append("metrics", 1, {"loss": 0.5})
    log.append("metrics", 2, {"loss": np.float32(0.25), "scores": np.array([1, 2])})
    assert read_records(tmp_path / "run") == [
        {"schema": SCHEMA, "step": 1, "loss": 0.5},
        {"schema": SCHEMA, "step": 2, "loss": 0.25, "scores": [1, 2]},
    ]


def test_streams_are_separate_and_config_is_stored(tmp_path):
    log = RunLog(tmp_path)
    log.write_config("seed: 1\n")
    log.append("metrics", 1, {})
    log.append("collapse", 1, {"mi_estimate": 1.5})
    assert read_records(tmp_path, "collapse")[0]["mi_estimate"] == 1.5
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "collapse.jsonl",
        "config.yaml",
        "lock",
        "metrics.jsonl",
    ]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    log = RunLog(tmp_path)
    log.append("metrics", 1, {"a": math.nan, "b": [math.inf, 1.0]})
    assert read_records(tmp_path) == [{"schema": SCHEMA, "step": 1, "a": None, "b": [None, 1.0]}]


def test_a_torn_last_line_is_skipped_by_readers_and_removed_by_the_next_writer(tmp_path):
    RunLog(tmp_path).append("metrics", 1, {"x": 1})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(1, len(whole)):
        (tmp_path / "metrics.jsonl").write_bytes(whole + whole[:cut])
        assert len(read_records(tmp_path)) == 1
    resumed = RunLog(tmp_path, resume=True)
    resumed.append("metrics", 2, {"x": 2})
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2]


def test_rewinding_forgets_later_steps(tmp_path):
    log = RunLog(tmp_path)
    for step in range(1, 6):
        log.append("metrics", step, {})
    log.append("collapse", 5, {})
    log.rewind(3)
    log.append("metrics", 4, {"again": True})
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2, 3, 4]
    assert read_records(tmp_path, "collapse") == []


def test_an_existing_run_is_not_overwritten(tmp_path):
    RunLog(tmp_path).append("metrics", 1, {})
    with pytest.raises(RunLogError, match="already holds a run"):
        RunLog(tmp_path)


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    log.append("metrics", 1, {"x": 1})
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:5]))
    with pytest.raises(RunLogError, match="disk is full"):
        log.append("metrics", 2, {"x": 2})

    def fail(fd, data):
        real_write(fd, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(RunLogError, match="No space left"):
        log.append("metrics", 2, {"x": 2})
    monkeypatch.undo()
    log.append("metrics", 2, {"x": 2})
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2]


def test_what_is_no_run_directory_is_named(tmp_path):
    with pytest.raises(RunLogError, match=r"is .* a run directory"):
        read_records(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunLogError, match="cannot write to run directory"):
        RunLog(file / "run")


def test_damaged_and_foreign_records_name_their_line(tmp_path):
    stream = tmp_path / "metrics.jsonl"
    stream.write_text('{"schema": 1, "step": 1}\nnot json\n')
    with pytest.raises(RunLogError, match="line 2 is not JSON"):
        read_records(tmp_path)
    stream.write_text(json.dumps({"schema": 99, "step": 1}) + "\n")
    with pytest.raises(RunLogError, match="schema 99"):
        read_records(tmp_path)


@pytest.mark.parametrize("key", ["step", "schema"])
def test_a_record_cannot_rename_its_step_or_schema(tmp_path, key):
    log = RunLog(tmp_path)
    with pytest.raises(RunLogError, match=f"may not hold '{key}'"):
        log.append("metrics", 3, {"loss": 1.0, key: 7})
    log.append("metrics", 3, {"loss": 1.0})
    assert read_records(tmp_path) == [{"schema": SCHEMA, "step": 3, "loss": 1.0}]


def test_a_run_that_never_wrote_to_a_stream_has_no_records_there(tmp_path):
    RunLog(tmp_path / "a").write_config("seed: 1\n")
    assert read_records(tmp_path / "a", "collapse") == read_records(tmp_path / "a") == []
    RunLog(tmp_path / "b").append("metrics", 1, {})
    assert read_records(tmp_path / "b", "collapse") == []


def test_a_run_that_never_finished_a_step_may_be_started_again(tmp_path):
    log = RunLog(tmp_path / "a")
    log.append("starts", 0, {"command": ["moored"]})
    RunLog(tmp_path / "a").append("metrics", 1, {})
    with pytest.raises(RunLogError, match="already holds a run"):
        check_folder(tmp_path / "a")


def test_rewinding_to_before_the_first_measurement_keeps_how_the_run_was_started(tmp_path):
    """A warm start without a checkpoint measures again, in the folder that its start noted."""
    log = RunLog(tmp_path)
    log.append("starts", 0, {"folder": "/project"})
    log.append("changes", 0, {"options": {"workers": {"old": 4, "new": 2}}})
    for step in (0, 1):
        log.append("metrics", step, {"evaluation/loss": 7.0})
    log.rewind(-1)
    assert [len(read_records(tmp_path, name)) for name in ("starts", "changes")] == [1, 1]
    assert read_records(tmp_path) == []


def test_rewinding_removes_later_rollouts_and_torn_ones(tmp_path):
    log = RunLog(tmp_path)
    log.rewind(1)
    folder = log.rollouts_file(1).parent
    folder.mkdir()
    for step in (1, 10, 11, 1_000_000):
        log.rollouts_file(step).touch()
    (folder / ".step_000020.parquet.99").touch()
    (folder / "step_all.parquet").touch()
    log.rewind(10)
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["step_000001.parquet", "step_000010.parquet", "step_all.parquet"]


def test_a_run_keeps_its_id_and_shares_it_with_no_other(tmp_path):
    first = RunLog(tmp_path / "a b/run?1").run_id()
    assert first == RunLog(tmp_path / "a b/run?1", resume=True).run_id()
    assert first.startswith("run-1-") and first != RunLog(tmp_path / "c/run?1").run_id()


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RunLogError, match=r"cannot write .*No space left"), replacing(file) as new:
        new.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_a_page_written_to_a_pipe_goes_through_it_and_leaves_the_pipe(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    # Never blocks: a second reader stays open while the text is written.
    kept = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    reader = threading.Thread(target=lambda: read.append(os.read(kept, 100)))
    write_atomically(pipe, "the page")
    assert pipe.is_fifo()
    reader.start()
    reader.join()
    os.close(kept)
    assert read == [b"the page"]


def test_a_page_written_to_a_link_to_a_device_leaves_both(tmp_path):
    link = tmp_path / "nowhere"
    link.symlink_to(os.devnull)
    write_atomically(link, "the page")
    assert link.is_symlink()
    assert link.is_char_device()
