"""Ctrl-C and SIGTERM while a run trains: the first waits for the step, the second does not.

In every command Ctrl-C waits for the end of an import.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers and `kill` send."""
RETRY_S = 0.05
"""How long a signal that has to wait does so before it is looked at again."""


class StopRequest:
    """Notes the first signal once steps are running; before that, and for the second, raises.

    Before steps are running, the first waits for the end of an import: raised in the middle of one,
    it aborts the process inside torch's C++, or is caught there and changes the exit code. So it
    does in a `__del__`, which nothing that is raised leaves.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self._before: dict[int, object] = {}
        self._waits_for_step = False
        self._retry: threading.Timer | None = None
        self._is_retried = False
        """True when a signal that had to wait is brought back."""
        self.signal: int | None = None
        """The last signal that came."""

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C and 143 after SIGTERM, as shells report them; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def wait_for_step(self) -> None:
        """From now on there is something to save."""
        self._waits_for_step = True

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        if self._retry is not None:
            self._retry.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self._is_retried or not self.is_made
        self._is_retried, self.signal = False, number
        if not is_first:
            raise KeyboardInterrupt
        if self._waits_for_step:
            # Not through a console or stream: the signal may have come while it was printing.
            os.write(2, b"\nstopping after this step; Ctrl-C or SIGTERM again stops at once\n")
        elif _must_wait(frame):
            self._retry = threading.Timer(RETRY_S, self._bring_back, [signal.Signals(number)])
            self._retry.daemon = True
            self._retry.start()
        else:
            raise KeyboardInterrupt

    def _bring_back(self, number: signal.Signals) -> None:
        """Runs in a thread of its own, and the handler in the main thread."""
        self._is_retried = True
        if hasattr(signal, "pthread_kill"):
            # A real signal, which also ends a sleep or the wait for a reply.
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            _thread.interrupt_main(number)


@contextmanager
def clean_interrupts() -> Iterator[None]:
    """Let Ctrl-C end what happens here with exit code 130, and not in the middle of an import."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Signals come to the main thread; ignored, as behind `&` in a script; seen to by a caller.
        yield
        return
    with StopRequest((signal.SIGINT,)) as stop:
        try:
            yield
            if stop.is_made:  # in an import that has ended just now
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(stop.exit_code) from None


def _must_wait(frame: FrameType | None) -> bool:
    """True while a module is being imported, or where Python would only print what is raised."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
