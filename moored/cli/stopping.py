"""Ctrl-C and SIGTERM while a run trains: the first waits for the step, the second does not."""

from __future__ import annotations

import os
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what schedulers and `kill` send."""


class StopRequest:
    """Notes the first signal once steps are running; before that, and for the second, raises."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._waits_for_step = False
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
        self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, _: object) -> None:
        is_first, self.signal = not self.is_made, number
        if not is_first or not self._waits_for_step:
            raise KeyboardInterrupt
        # Not through a console or stream: the signal may have come in the middle of its printing.
        os.write(2, b"\nstopping after this step; Ctrl-C or SIGTERM again stops at once\n")
