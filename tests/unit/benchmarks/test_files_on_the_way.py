"""The count of files sees the n-th call and what runs inside it, in every thread."""

from __future__ import annotations

import contextlib
import sys
import threading

from benchmarks.files_on_the_way import Watch
from moored.errors import UnknownNameError
from moored.names import Registry


def look_up(name: str) -> None:
    with contextlib.suppress(UnknownNameError):
        Registry("thing", {"a": "no.such:thing"}).get_object(name)


def watched(nth: int, *names: str) -> list[str]:
    watch = Watch("names.py", "get_object", nth=nth)
    sys.setprofile(watch)
    try:
        for name in names:
            look_up(name)
    finally:
        sys.setprofile(None)
    return watch.files()


def test_only_the_nth_call_and_what_it_calls_count():
    # An unknown name asks errors.py for a close match; a known one fails to import.
    assert watched(1, "b", "a") == ["names.py", "errors.py"]
    assert watched(2, "b", "a") == ["names.py"]
    assert watched(3, "b", "a") == []


def test_other_threads_count_too():
    watch = Watch("names.py", "get_object", nth=1)
    threading.setprofile(watch)
    try:
        thread = threading.Thread(target=look_up, args=("b",))
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    assert watch.files() == ["names.py", "errors.py"]
