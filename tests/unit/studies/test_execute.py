"""What becomes of runs by the code that their processes end with."""

from __future__ import annotations

import pytest

from moored.runlog.log import STOPPED_EARLY
from moored.studies.declaration import plan_runs, read_study
from moored.studies.execute import run_all
from moored.studies.folder import StudyFolder


class Ends:
    """A process that has ended when it is looked at for the second time."""

    def __init__(self, code: int) -> None:
        self.codes = iter([None, code])

    def poll(self) -> int | None:
        return next(self.codes)

    def wait(self, timeout: float | None = None) -> int:
        raise AssertionError("it is polled")

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize(
    ("code", "is_stopped", "what"),
    [
        (0, False, "finished"),
        (STOPPED_EARLY, False, "finished"),
        (STOPPED_EARLY, True, "finished"),
        (143, True, "stopped"),
        (1, False, "failed"),
    ],
)
def test_a_run_that_stopped_itself_has_finished(tmp_path, code, is_stopped, what):
    study = read_study("bottle")
    run, events, looks = plan_runs(study)[0], list[tuple[str, str]](), iter([False])
    run_all(
        StudyFolder(tmp_path / "study", study),
        [run],
        jobs=1,
        launch=lambda words, log: Ends(code),
        on_event=lambda _, what, detail: events.append((what, detail)),
        on_poll=lambda runs: None,
        is_stopped=lambda: next(looks, is_stopped),
    )
    assert [what for what, _ in events] == ["started", what]
    assert ("early" in events[-1][1]) is (code == STOPPED_EARLY)
