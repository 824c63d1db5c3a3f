"""Count the files of `moored` that a training step and a diagnosis pass through.

    python benchmarks/files_on_the_way.py [--check]

A file counts when at least one of its functions runs, in any thread, during (a) the second step of
GRPO on Sokoban with `nano` on a CPU, collapse measured and rollouts stored, or (b) the second
`moored diagnose --rescore` of that run, from reading to verdict. What runs once at import does not
count, nor do `__init__.py` files. Prints the files in order of their first call. `--check` fails
when docs/architecture.md does not name one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

import moored
from moored.cli.main import main as run_command

PACKAGE = Path(moored.__file__).parent
TRAIN = (
    *("train", "sokoban", "grpo", "model=nano", "engine.device=cpu", "num_steps=2"),
    *("rollout.num_groups=4", "rollout.group_size=4", "rollout.max_response_tokens=32"),
    *("collapse.every=1", "log.rollouts_every=1"),
)


class Watch:
    """Notes the functions that are called while the n-th call of one function lasts."""

    def __init__(self, file: str, function: str, *, nth: int) -> None:
        self._place, self._nth = (str(PACKAGE / file), function), nth
        self._num_calls = 0
        self._outer: FrameType | None = None
        self._seen: dict[CodeType, None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function for `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and (code.co_filename, code.co_name) == self._place:
            self._num_calls += 1
            if self._num_calls == self._nth:
                self._outer = frame
        if self._outer is None:
            return
        if event == "call":
            self._seen[code] = None
        elif event == "return" and frame is self._outer:
            self._outer = None

    def files(self) -> list[str]:
        """Files of the package, in order of their first call."""
        found = {}
        for code in self._seen:
            path = Path(code.co_filename)
            # The bodies of modules and classes are not optimized code.
            is_function = code.co_flags & inspect.CO_OPTIMIZED
            if is_function and path.is_relative_to(PACKAGE) and path.name != "__init__.py":
                found[path.relative_to(PACKAGE).as_posix()] = None
        return list(found)


def watch(watch: Watch, *commands: tuple[str, ...]) -> list[str]:
    """Run commands in this process and return the files that the watch noted."""
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        for command in commands:
            _run(command)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return watch.files()


def _run(command: tuple[str, ...]) -> None:
    sys.argv = ["moored", *command]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            run_command()
    except SystemExit as end:
        if end.code:
            sys.exit(f"moored {' '.join(command)} failed:\n{shown.getvalue()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of moored that docs/architecture.md names.")
    parser.add_argument("--check", action="store_true", help="fail on files it does not name")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        step = watch(Watch("train.py", "train_step", nth=2), (*TRAIN, "--run", run))
        diagnose = ("diagnose", run, "--rescore", "--draws", "50")
        diagnosis = watch(Watch("cli/diagnose.py", "diagnose_command", nth=2), diagnose, diagnose)
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    problems = []
    for what, files in (("a training step", step), ("moored diagnose", diagnosis)):
        print(f"{what}: {len(files)} files", *files, sep="\n  ")
        if not files:
            problems.append(f"no files on the way of {what}")
        unnamed = [file for file in files if f"`{file}`" not in page]
        if unnamed:
            problems.append(f"docs/architecture.md does not name {', '.join(unnamed)}")
    if check and problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
