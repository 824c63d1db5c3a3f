"""`moored study` whose runs are forks of it: each begins with torch and transformers imported.

A program for `tests.warm`. A run keeps its own signals, session, environment, output and exit code;
only the command that `moored.studies.execute` gives to Python is not started anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from moored.cli.main import main
from moored.studies import execute

START = "from tests.e2e.forked_runs import run_study; run_study()"
MAX_FILES = 1000


class ForkedRun(subprocess.Popen):
    """`python -P -c ENTRY words…` without the start of Python: what comes before it never ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        preexec_fn: Callable[[], None],
        **options: Any,
    ) -> None:
        assert list(command[:4]) == [sys.executable, "-P", "-c", execute.ENTRY]

        def run() -> None:
            preexec_fn()
            # One of these tells `Popen` that the program was started.
            os.closerange(3, MAX_FILES)
            os.environ.clear()
            os.environ.update(env)
            os._exit(_exit_code_of_main(command[4:]))

        super().__init__(command, preexec_fn=run, **options)


def _exit_code_of_main(words: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *words]
    try:
        main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run_study() -> None:
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    execute.subprocess = SimpleNamespace(Popen=ForkedRun, **names)  # pyright: ignore
    main()
