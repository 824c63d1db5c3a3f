"""Sinks get every number, go on after a resume, and cannot stop a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from moored.config import LogConfig
from moored.errors import ConfigError
from moored.runlog.log import RunLog
from moored.runlog.sinks import SINKS, RunInfo, Sinks, require_sinks


def info(folder: Path, first_step: int = 1) -> RunInfo:
    log = RunLog(folder, resume=True)
    return RunInfo(log=log, project="demo", config={"seed": 1}, first_step=first_step)


def send(name: str, folder: Path, steps: Sequence[int], value: float = 0.5) -> None:
    """One process: open at the first step, log, close."""
    sinks = Sinks()
    sinks.open([name], info(folder, steps[0]))
    for step in steps:
        sinks.log(step, {"rollout/reward_mean": value, "rollout_s": float(step)})
    sinks.close()


class Recorder:
    """Stands for the wandb or the trackio package, and for their runs."""

    def __init__(self, step: int = 0) -> None:
        self.step = self._next_step = step
        self.options: dict[str, object] = {}
        self.sent: list[tuple[int, float]] = []
        self.is_finished = False

    def init(self, **options: object) -> Recorder:
        self.options = options
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append((step, values["rollout_s"]))
        self.step = step

    def finish(self) -> None:
        self.is_finished = True


def test_every_sink_of_the_configuration_exists():
    (literal,) = get_args(LogConfig.model_fields["sinks"].annotation)
    assert set(get_args(literal)) == set(SINKS)


@pytest.mark.parametrize(("name", "id_option"), [("wandb", "id"), ("trackio", "name")])
def test_a_resumed_run_is_the_same_run(name, id_option, tmp_path, monkeypatch):
    seen = []
    for _ in range(2):
        package = Recorder()
        monkeypatch.setitem(sys.modules, name, package)
        send(name, tmp_path / "my run", range(1, 3))
        seen.append(package.options)
        assert package.sent == [(1, 1.0), (2, 2.0)] and package.is_finished
    assert seen[0][id_option] == seen[1][id_option]
    assert str(seen[0][id_option]).startswith("my-run-")
    assert (seen[0]["resume"], seen[0]["project"]) == ("allow", "demo")
    send(name, tmp_path / "other", range(1, 2))
    assert package.options[id_option] != seen[0][id_option]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_steps_that_a_sink_has_already_are_not_sent_again(name, tmp_path, monkeypatch):
    package = Recorder(step=5)
    monkeypatch.setitem(sys.modules, name, package)
    send(name, tmp_path, range(3, 7))
    assert package.sent == [(5, 5.0), (6, 6.0)]


def test_steps_done_again_after_a_lost_worker_are_not_sent_to_trackio_twice(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", package)
    send("trackio", tmp_path, [1, 2, 3, 2, 3, 4])
    assert [step for step, _ in package.sent] == [1, 2, 3, 4]


def test_tensorboard_curves_continue_where_the_run_was_resumed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send("tensorboard", tmp_path, range(1, 5), value=1.0)
    send("tensorboard", tmp_path, range(3, 6), value=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["rollout/reward_mean", "rollout_s"]
    curve = [(event.step, event.value) for event in events.Scalars("rollout/reward_mean")]
    assert curve == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_wandb_offline_writes_one_run_id_under_the_run_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    send("wandb", tmp_path, range(1, 3))
    send("wandb", tmp_path, range(2, 4))
    run_id = RunLog(tmp_path, resume=True).run_id()
    files = {file.name for file in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert files == {f"run-{run_id}.wandb"}


def test_trackio_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    send("trackio", tmp_path / "run", range(1, 4))
    send("trackio", tmp_path / "run", range(3, 5))
    run_id = RunLog(tmp_path / "run", resume=True).run_id()
    assert [run.name for run in trackio.Api().runs("demo")] == [run_id]
    assert [each["step"] for each in SQLiteStorage.get_logs("demo", run_id)] == [1, 2, 3, 4]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_sink_that_fails_warns_once_and_the_others_go_on(broken, tmp_path, monkeypatch, caplog):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    bad, good = Recorder(), Recorder()
    setattr(bad, broken, fail)
    monkeypatch.setitem(sys.modules, "wandb", bad)
    monkeypatch.setitem(sys.modules, "trackio", good)
    sinks = Sinks()
    sinks.open(["wandb", "trackio"], info(tmp_path))
    for step in (1, 2, 3):
        sinks.log(step, {"rollout_s": 0.0})
    sinks.close()
    assert [step for step, _ in good.sent] == [1, 2, 3] and good.is_finished
    assert len(caplog.records) == 1
    assert "wandb failed; the run goes on" in caplog.text and "no network" in caplog.text


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace())
    require_sinks(["trackio"])
    with pytest.raises(ConfigError, match=r"pip install 'moored\[wandb\]'"):
        require_sinks(["trackio", "wandb"])
