"""A child process that can be killed: asked, limited, lost and replaced."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moored.envs.worker import Worker, WorkerLost
from moored.errors import EnvError

HANDLERS = """
import os, subprocess, sys, time
from moored.envs.worker import die_after, emit

class Picky(Exception):
    def __init__(self, a, b):
        super().__init__("picky")

def count(number):
    for i in range(number):
        print("noise between the answers")
        emit(i)
    return "all"

def fall_silent():
    emit("last words")
    time.sleep(3600)

def raise_picky():
    raise Picky(1, 2)

def start_helper():
    return subprocess.Popen(["sleep", "3600"]).pid

def sleep_within(limit_s):
    die_after(wall_s=limit_s)
    time.sleep(3600)

def prepare():
    os.environ["PREPARED"] = "once"

def wait_a_second():
    open(os.path.join(os.path.dirname(__file__), "prepares"), "w").close()
    time.sleep(1.0)

def environment():
    return os.environ["PREPARED"], os.environ["GIVEN"]
"""
EVER = range(10**12)


@pytest.fixture
def handlers(tmp_path, monkeypatch) -> str:
    (tmp_path / "worker_handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "worker_handlers"


def test_a_worker_answers_like_its_handler():
    worker = Worker("operator:truediv")
    assert worker.ask(6, 3) == 2.0
    with pytest.raises(ZeroDivisionError):
        worker.ask(1, 0)
    assert worker.ask(1, 4) == 0.25


@pytest.mark.parametrize("limits", [{"cpu_s": 0.2}, {"wall_s": 0.2}], ids=["cpu", "wall"])
def test_what_takes_too_long_is_killed_and_the_next_answer_needs_no_new_child(limits):
    worker = Worker("builtins:sum")  # one long call into C, which no exception could stop
    assert worker.ask([1, 2]) == 3
    child = worker._process
    for _ in range(2):
        with pytest.raises(WorkerLost) as lost:
            worker.ask(EVER, **limits)
        assert lost.value.is_late
    assert worker.ask([3, 4]) == 7
    assert worker._process is child


def test_waiting_does_not_count_as_computing():
    worker = Worker("time:sleep")
    assert worker.ask(0.3, cpu_s=0.25) is None


def test_a_limit_ends_with_its_request():
    worker = Worker("signal:getitimer")
    assert worker.ask(signal.ITIMER_REAL, wall_s=3600)[0] > 0
    assert worker.ask(signal.ITIMER_REAL)[0] == 0


def test_a_handler_may_shorten_its_limit(handlers):
    worker = Worker(f"{handlers}:sleep_within")
    with pytest.raises(WorkerLost) as lost:
        worker.ask(0.1, wall_s=3600)
    assert lost.value.is_late


def test_memory_is_bounded():
    worker = Worker("operator:mul", memory_bytes=1 << 30)
    with pytest.raises(MemoryError):
        worker.ask(b"x", 2 << 30)
    assert worker.ask(b"x", 2) == b"xx"


@pytest.mark.parametrize("code", [0, 3])
def test_a_handler_that_ends_its_process_loses_one_request(code):
    worker = Worker("os:_exit")
    for _ in range(2):
        with pytest.raises(WorkerLost, match=f"exit code {code}") as lost:
            worker.ask(code)
        assert lost.value.exit_code == code and not lost.value.is_late


@pytest.mark.parametrize(("code", "found"), [((), 0), ((3,), 3), (("the licence expired",), 1)])
def test_a_handler_that_exits_loses_one_request(code, found):
    worker = Worker("sys:exit")
    for _ in range(2):
        with pytest.raises(WorkerLost) as lost:
            worker.ask(*code)
        assert lost.value.exit_code == found


def test_a_child_that_was_killed_is_started_again():
    worker = Worker("operator:add")
    assert worker.ask(1, 2) == 3
    lost = worker._process
    assert lost is not None
    lost.kill()
    lost.wait()
    assert worker.ask(3, 4) == 7
    assert worker._process is not lost


def kill_answering_process(worker: Worker) -> None:
    """As the system does for its memory, between two requests."""
    assert worker._process is not None
    pid = worker._process.pid
    (answering,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(answering), signal.SIGKILL)
    while worker._heard.empty():
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_process_that_is_killed_while_idle_is_replaced_and_no_answer_is_mistaken():
    worker = Worker("operator:add")
    assert worker.ask(1, 2) == 3
    kill_answering_process(worker)
    assert [worker.ask(number, 4) for number in range(3)] == [4, 5, 6]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_an_answer_to_a_request_that_was_given_up_is_not_the_next_ones(monkeypatch):
    """A process killed just before it reads a request: its replacement answers all the same."""
    worker = Worker("operator:add")
    assert worker.ask(1, 2) == 3
    kill_answering_process(worker)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_has_ended", lambda: False)
        with pytest.raises(WorkerLost, match="exit code -9"):
            worker.ask(3, 4)
    assert [worker.ask(number, 4) for number in range(3)] == [4, 5, 6]


def test_an_interrupted_request_is_not_answered_to_the_next(monkeypatch):
    worker = Worker("operator:add")
    worker.start()

    def interrupt(limit_s: float | None) -> tuple[str, object]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(1, 2)
    assert worker.ask(3, 4) == 7


def test_threads_get_their_own_answers():
    worker = Worker("operator:mul")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(worker.ask, range(40), range(40)))
    assert found == list(map(operator.mul, range(40), range(40)))


def test_items_come_before_the_result_and_prints_do_not_disturb(handlers):
    worker = Worker(f"{handlers}:count")
    assert list(worker.watch(3, limit_s=60.0)) == [0, 1, 2]
    assert worker.ask(2) == "all"


def test_a_watched_child_that_falls_silent_is_killed(handlers):
    heard = []
    with pytest.raises(WorkerLost) as lost:
        heard += Worker(f"{handlers}:fall_silent").watch(limit_s=0.1)
    assert lost.value.exit_code is None and lost.value.is_late
    assert heard == ["last words"]


def test_an_error_that_cannot_travel_comes_as_text(handlers):
    with pytest.raises(EnvError, match="Picky: picky"):
        Worker(f"{handlers}:raise_picky").ask()


def test_the_child_is_prepared_once_and_has_its_environment(handlers):
    worker = Worker(
        f"{handlers}:environment", prepare=f"{handlers}:prepare", environ={"GIVEN": "yes"}
    )
    assert worker.ask() == ("once", "yes")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stopping_ends_what_the_child_started(handlers):
    worker = Worker(f"{handlers}:start_helper")
    helper = worker.ask()
    assert _is_running(helper)
    worker.stop()
    while _is_running(helper):
        time.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process of its own session")
def test_a_child_whose_owner_was_killed_while_it_started_ends_without_a_word(handlers, tmp_path):
    script = (
        "from moored.envs.worker import Worker\n"
        f"Worker('{handlers}:count', prepare='{handlers}:wait_a_second', is_quiet=False).start()\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    while not (tmp_path / "prepares").exists():
        assert owner.poll() is None
        time.sleep(0.01)
    owner.kill()
    # Complete only when the child has ended too, since it has the same stderr.
    assert owner.communicate() == (None, b"")


def test_a_handler_that_cannot_be_imported_is_an_error():
    with pytest.raises(EnvError, match="no_such_module"):
        Worker("no_such_module:f").ask()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_the_child_alone():
    worker = Worker("operator:add")
    worker.start()
    pid = os.fork()
    if pid == 0:
        worker.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    child = worker._process
    assert worker.ask(1, 2) == 3 and worker._process is child


def test_a_worker_that_is_forgotten_ends_its_child():
    worker = Worker("operator:add")
    worker.start()
    child = worker._process
    assert child is not None
    del worker
    assert child.wait(60) != 0


def test_starting_ahead_is_safe_in_threads():
    worker = Worker("operator:add")
    threads = [threading.Thread(target=worker.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worker.ask(1, 1) == 2


def test_stopping_in_another_thread_ends_a_request_that_waits():
    worker = Worker("time:sleep")
    worker.start()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(worker.ask, 3600, wall_s=60.0)
        time.sleep(0.2)
        worker.stop()
        with pytest.raises(WorkerLost, match="exit code -9"):
            asked.result()


def _is_running(pid: int) -> bool:
    """False for a process that is gone or only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_modules_are_found_in_the_order_of_this_process(tmp_path, monkeypatch):
    """A file of that name in the current folder comes where that folder is on the path."""
    for name in ("start", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of_both.py").write_text(f"def where():\n    return {name!r}\n")
    (tmp_path / "here/random.py").write_text("raise SystemExit('not the module of Python')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "start"), str(tmp_path / "here")])
    worker = Worker("of_both:where", prepare="random:random")
    assert worker.ask() == "start"
    worker.stop()
