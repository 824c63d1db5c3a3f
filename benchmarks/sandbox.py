"""How fast the sandbox of `code` is, and whether the solutions of HumanEval and MBPP pass in it.

    python benchmarks/sandbox.py [--programs 500] [--data FOLDER] [--out FILE]
    python benchmarks/sandbox.py --sandbox docker --image python:3.11-slim --programs 40

Short programs (one line, one test) run in fresh sandboxes, from one thread and from as many as
there are cores. With `--data`, a folder that holds `HumanEval.jsonl.gz` and `mbpp.jsonl`, every
reference program is judged, and beside it a wrong one, which must not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from moored.envs.code.judge import judge
from moored.envs.code.problem import Problem
from moored.envs.code.rows import load_problems
from moored.envs.code.sandbox import Job, SandboxPool

TARGET_PER_S = 50.0
MAX_TESTS = 100
WALL_S = 20.0
WRONG = "def {entry}(*arguments, **options):\n    return 'something else'\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the sandbox of the environment code.")
    parser.add_argument("--programs", type=int, default=500, help="short programs to time")
    parser.add_argument("--data", type=Path, help="folder with HumanEval.jsonl.gz and mbpp.jsonl")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sandbox", choices=("bubblewrap", "docker"), default="bubblewrap")
    parser.add_argument("--image", default="python:3.11-slim", help="what docker runs")
    arguments = parser.parse_args()
    pool = SandboxPool(arguments.sandbox, image=arguments.image)
    pool.open()
    with closing(pool):
        figures: dict[str, object] = {"short programs": time_programs(pool, arguments.programs)}
        for name in ("HumanEval.jsonl.gz", "mbpp.jsonl") if arguments.data else ():
            figures[name] = judge_references(pool, arguments.data / name)
    record = {**describe_machine(arguments.sandbox), "figures": figures}
    print(json.dumps(record, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def time_programs(pool: SandboxPool, count: int) -> dict[str, object]:
    """Programs a second, and milliseconds of one."""
    job = Job(kind="stdin", source="print(2 * int(input()))", tests=("21",), wall_s=WALL_S)

    def run_one(_: int) -> float:
        start_s = time.perf_counter()
        [outcome] = pool.run(job)
        assert outcome.content == b"42\n", outcome
        return time.perf_counter() - start_s

    found: dict[str, object] = {"count": count, "target_per_s": TARGET_PER_S}
    for num_threads in (1, 2 * (os.cpu_count() or 1)):
        start_s = time.perf_counter()
        seconds = in_threads(num_threads, run_one, range(count))
        found[f"{num_threads} threads"] = {
            "per_s": round(count / (time.perf_counter() - start_s), 1),
            "median_ms": round(statistics.median(seconds) * 1e3, 1),
        }
    return found


def judge_references(pool: SandboxPool, path: Path) -> dict[str, object]:
    """How many reference programs pass, and how many wrong ones."""
    problems = [x for found in load_problems(path, MAX_TESTS).values() for x in found]

    def passes(problem: Problem) -> bool:
        return judge(problem.solution, problem, pool, wall_s=WALL_S).is_right

    def is_fooled(problem: Problem) -> bool:
        wrong = WRONG.format(entry=problem.entry)
        return judge(wrong, problem, pool, wall_s=WALL_S).is_right

    num_threads = os.cpu_count() or 1
    start_s = time.perf_counter()
    right = in_threads(num_threads, passes, problems)
    seconds = time.perf_counter() - start_s
    fooled = in_threads(num_threads, is_fooled, problems)
    pairs = zip(problems, right, strict=True)
    return {
        "num_rows": len(problems),
        "num_passed": sum(right),
        "not_passed": [problem.entry for problem, is_right in pairs if not is_right],
        "wrong_programs_passed": sum(fooled),
        "seconds": round(seconds, 1),
    }


def in_threads(count: int, call: Callable, parts: Sequence) -> list:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, parts))


def describe_machine(sandbox: str) -> dict[str, object]:
    docker = ["docker", "version", "--format", "{{.Server.Version}}"]
    command = docker if sandbox == "docker" else ["bwrap", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        "command": f"python benchmarks/sandbox.py {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        sandbox: version.stdout.split()[-1],
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
