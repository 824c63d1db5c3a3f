"""How big is the house? Counts of one checkout, or of several side by side.

    python benchmarks/house.py [FOLDER ...]
    git worktree add --detach /tmp/before REVISION && python benchmarks/house.py /tmp/before .

Lines are those of `*.py`, words those of the Markdown under `docs/` and of README.md. Public
classes are those of the package whose names have no leading underscore; options are the leaves of a
training configuration. Files on the way are counted by `files_on_the_way.py` of each checkout. Hops
are the functions of the package that are on the stack, in the thread concerned, when an environment
steps and, from `Learner.step` on, when a loss is computed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

OPTIONS = """
from pydantic import BaseModel
from moored.config import Config
def leaves(model):
    for field in model.model_fields.values():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner)
        else:
            yield field
print(sum(1 for _ in leaves(Config)))
"""
LOADED = """
import sys, moored.engine.local.engine
print(sum(name.split(".")[0] == "moored" for name in sys.modules))
"""
HOPS = """
import sys, tempfile, threading
import moored
from moored.cli.main import main
depths = {}
def stack(frame):
    while frame:
        if "/moored/" in frame.f_code.co_filename:
            yield frame.f_code
        frame = frame.f_back
def watch(frame, event, _):
    code = frame.f_code
    if event != "call":
        return
    if code.co_name == "step" and code.co_filename.endswith("envs/game.py"):
        depths.setdefault("env.step", len(list(stack(frame.f_back))))
    if code.co_filename.endswith("training/losses.py") and "clip" in code.co_name:
        names = [c.co_name for c in stack(frame)]
        if "step" in names:
            depths.setdefault("clip", names.index("step"))
words = "sokoban grpo model=nano engine.device=cpu num_steps=1 rollout.num_groups=4"
words += " rollout.group_size=4 rollout.max_response_tokens=32 collapse.every=0"
with tempfile.TemporaryDirectory() as folder:
    sys.argv = ["moored", "train", *words.split(), "--run", folder + "/run"]
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        main()
    except SystemExit:
        pass
    sys.setprofile(None)
    threading.setprofile(None)
print(depths["env.step"], depths["clip"])
"""


def python_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


def lines(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in python_files(folder))


def words(tree: Path) -> int:
    pages = [tree / "README.md", *(tree / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def public_classes(package: Path) -> int:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in python_files(package))
    return sum(
        isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for tree in trees
        for node in ast.walk(tree)
    )


def printed(tree: Path, *command: str) -> str:
    """What Python prints with the package of this checkout."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=tree, check=True, capture_output=True, text=True
    )
    return done.stdout


def measure(tree: Path) -> dict[str, int]:
    """Every count of one checkout."""
    way = printed(tree, "benchmarks/files_on_the_way.py")
    step, diagnosis = (int(n) for n in re.findall(r": (\d+) files", way))
    env_step, clip = (int(n) for n in printed(tree, "-c", HOPS).split()[-2:])
    return {
        "lines of the package": lines(tree / "moored"),
        "files of the package": len(python_files(tree / "moored")),
        "lines of tests": lines(tree / "tests"),
        "words of docs": words(tree),
        "public classes": public_classes(tree / "moored"),
        "options of `train`": int(printed(tree, "-c", OPTIONS)),
        "files on the way of a step": step,
        "files on the way of `diagnose`": diagnosis,
        "functions on the stack at `env.step`": env_step,
        "hops from `learner.step` to the clip": clip,
        "modules of the one-process engine": int(printed(tree, "-c", LOADED)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts of checkouts, side by side.")
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).parent.parent])
    counts = [measure(folder.resolve()) for folder in parser.parse_args().folders]
    for name in counts[0]:
        print(f"| {name} |", " | ".join(f"{count[name]:,}" for count in counts), "|")


if __name__ == "__main__":
    main()
