"""DeepCoder: write a Python program that passes hidden tests. One turn by default."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from moored.envs.base import (
    FORMAT_REMINDER,
    Resource,
    StepResult,
    draw_task,
    read_range,
    split_of_seed,
)
from moored.envs.code.families import LEVELS
from moored.envs.code.generate import draw_draft, make_problem
from moored.envs.code.isolation import Kind, Limits, make_isolation
from moored.envs.code.judge import Verdict, find_program, judge
from moored.envs.code.problem import Problem, parse_source
from moored.envs.code.rows import load_problems
from moored.envs.code.sandbox import SandboxPool
from moored.envs.teaching import fill
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

MAX_ASKED_CHARS = 160
MAX_NAMES = 6


class Code:
    """Write a Python program or function that passes hidden tests (runs under bubblewrap).

    Without a `source` the problems are generated: 28 families, from a formula in one line to
    dynamic programming, each with many parameters. Half of them ask for a program that reads
    standard input and prints, half for a function. The answer is the program, bare or in a fenced
    block. It runs on every test in a sandbox: no network, no files but a /tmp of its own, one
    process, limits on time, memory, threads, files and output. Only the standard library is there.
    Without bubblewrap (`apt-get install bubblewrap`) no run begins.

    Reward: the share of tests passed, or with `reward="all"` 1 for all of them and 0 otherwise.
    Success is to pass all. A program that is not Python, prints nothing or lacks the function earns
    0 and is not run; a malformed reply earns `format_penalty`. With several turns, a turn earns
    what it adds to the best so far. The episode is terminated by success or by the last turn: tries
    are part of the task, so it is never truncated.

    Outputs are compared line by line without white space at the ends, numbers by value (`1.0` is
    `1.00`), and with a tolerance of 1e-5 where the data set's own judge has one. Expected outputs
    do not enter the sandbox. Tests that are code, a third of HumanEval's, run in a sandbox of their
    own, and what the program returns crosses to it as plain data. A program can deceive only tests
    that need its own objects (5 rows of MBPP): these run beside it, and are never trained on.

    Options:
    - `source=None`: rows of DeepCoder-Preview (PrimeIntellect, TACO, LiveCodeBench v5), HumanEval
      or MBPP: a JSON, JSONL (also .gz) or Parquet file (Parquet needs `moored[data]`), or
      `"hub:owner/name:config:split"` (needs `datasets`). HumanEval, MBPP's test rows and files or
      splits called test are never trained on.
    - `level=(1, 3)`: difficulty of the made problems, one level or a range, 1 easy to 3 hard.
    - `reward="fraction"`: or "all", for all or nothing.
    - `max_turns=1`: tries an episode has.
    - `max_tests=15`: of a row with more tests, those with the longest input are run.
    - `time_limit_s=2.0`: wall time of a test; a test that exceeds it ends the run of all.
    - `memory_mb=512`: memory of a program.
    - `sandbox="bubblewrap"`: or "docker", or "none" to run programs unprotected as this user.
      Docker starts a container for each program: about two a second where bubblewrap runs 110.
    - `image="python:3.11-slim"`: what docker runs, an image with Python 3.11 or newer; it is not
      pulled.
    - `format_penalty=-0.1`: reward of a malformed reply.
    """

    name: ClassVar[str] = "code"
    is_stochastic: bool = False
    sandbox_pool: SandboxPool

    def __init__(
        self,
        *,
        source: str | Path | None = None,
        level: int | Sequence[int] = (1, 3),
        reward: Literal["fraction", "all"] = "fraction",
        max_turns: int = 1,
        max_tests: int = 15,
        time_limit_s: float = 2.0,
        memory_mb: int = 512,
        sandbox: Kind = "bubblewrap",
        image: str = "python:3.11-slim",
        format_penalty: float = -0.1,
    ) -> None:
        self.levels = read_range("code: level", level, LEVELS[0], LEVELS[-1])
        for option, value, low, high in (
            ("max_turns", max_turns, 1, 1000),
            ("max_tests", max_tests, 1, 1000),
            ("time_limit_s", time_limit_s, 0.1, 30.0),
            ("memory_mb", memory_mb, 64, 1 << 20),
        ):
            if not low <= value <= high:
                raise EnvError(f"code: {option} must lie within {low} and {high}, got {value!r}")
        self.limits = Limits(memory_mb=memory_mb)
        if source is not None:
            load_problems(source, max_tests)
        self.source = source
        self.reward = reward
        self.max_turns = max_turns
        self.max_tests = max_tests
        self.time_limit_s = time_limit_s
        self.sandbox: Kind = sandbox
        self.image = image
        self.format_penalty = format_penalty
        self._problem: Problem | None = None
        self._turn = 0
        self._best = 0.0
        self._over = True

    def resources(self) -> dict[str, Resource]:
        return {"sandbox_pool": SandboxPool(self.sandbox, self.limits, self.image)}

    def check_available(self) -> None:
        make_isolation(self.sandbox, self.limits, image=self.image)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._problem = self._draw_problem(task_seed)
        self._turn, self._best, self._over = 0, 0.0, False
        user = f"{self._turn_line()}{self._problem.statement}\n{FORMAT_REMINDER}."
        return [Message("system", self._rules()), Message("user", user)]

    def step(self, reply: str) -> StepResult:
        if self._over or self._problem is None:
            raise EnvError("code: the episode is over; call reset before step")
        answer = parse_reply(reply).answer
        self._turn += 1
        self._over = self._turn >= self.max_turns
        if answer is None:
            return StepResult(
                observation=self._feedback("Malformed reply.", self.format_penalty),
                reward=self.format_penalty,
                penalty=self.format_penalty,
                terminated=self._over,
                is_valid=False,
            )
        verdict = judge(answer, self._problem, self.sandbox_pool, wall_s=self.time_limit_s)
        worth = float(verdict.is_right) if self.reward == "all" else verdict.share
        reward = max(0.0, worth - self._best)
        self._best = max(self._best, worth)
        self._over = self._over or verdict.is_right
        return StepResult(
            observation=self._feedback(_describe(verdict), reward),
            reward=reward,
            terminated=self._over,
            success=verdict.is_right,
            metrics={
                "tests_passed": verdict.share,
                "not_python": float(not verdict.is_program),
                "timed_out": float(verdict.is_late),
            },
        )

    def oracle(self) -> str:
        if self._problem is None:
            raise EnvError("code: there is no task yet; call reset before oracle")
        if not self._problem.solution:
            raise EnvError("code: the row gives no solution, so there is no oracle for it")
        return self._problem.solution

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """What the problem asks, and the plan of the program."""
        assert self._problem is not None
        return explain(self._problem, answer, rng)

    def close(self) -> None:
        self._over = True

    def _draw_problem(self, task_seed: int) -> Problem:
        if self.source is None:
            draw = functools.partial(draw_draft, levels=self.levels)
            return make_problem(*draw_task(task_seed, draw, lambda draft: draft.key))
        split = split_of_seed(task_seed)
        # Rows live in the loader's cache: shared by all instances, never pickled with one.
        problems = load_problems(self.source, self.max_tests)[split]
        if not problems:
            raise EnvError(
                f"code: '{self.source}' has no {split} rows; some data sets are for testing only, "
                f"give source another file, or evaluate with split=test"
            )
        return random.Random(task_seed).choice(problems)

    def _rules(self) -> str:
        turns = "You have one turn." if self.max_turns == 1 else f"You have {self.max_turns} turns."
        worth = {
            "fraction": "Reward: the share of hidden tests that it passes",
            "all": "Reward: 1 if it passes all hidden tests, else 0",
        }
        return (
            "Solve the problem in Python 3, with the standard library alone. The program runs on "
            f"hidden tests, {self.time_limit_s:g} s and {self.limits.memory_mb} MB each, without "
            f"network.\n{turns} {worth[self.reward]}; {self.format_penalty:g} for a malformed "
            f"reply.\n{FORMAT_REMINDER}, where the answer is the whole program."
        )

    def _turn_line(self) -> str:
        return "" if self.max_turns == 1 else f"Turn {self._turn + 1} of {self.max_turns}.\n"

    def _feedback(self, verdict: str, reward: float) -> str:
        lead = f"{verdict} Reward: {reward:g}."
        if self._over:
            return f"{lead} The episode is over."
        return f"{lead}\n{self._turn_line()}Try again.\n{FORMAT_REMINDER}."


def _describe(verdict: Verdict) -> str:
    passed = f"{verdict.num_passed} of {verdict.num_tests} tests passed."
    return f"{passed} {verdict.failure}".rstrip()


def explain(problem: Problem, answer: str, rng: random.Random) -> str:
    """What the problem asks, in its own words, and the plan of the program.

    A row of a data set has no plan: its program says what it defines and calls.
    """
    asks = problem.asks or _first_sentence(problem.statement)
    plan = problem.plan or outline(answer)
    return f"{fill('{Given|From}', rng)} {asks}. {fill('{Plan|So}', rng)}: {plan}."


def outline(answer: str) -> str:
    """What a program defines, and by what it does the work: loops and calls."""
    source = find_program(answer)
    if source is None:
        return "write it in Python"
    defined: list[str] = []
    used: list[str] = []
    for node in ast.walk(parse_source(source)):
        match node:
            case ast.FunctionDef():
                defined.append(f"{node.name}({', '.join(arg.arg for arg in node.args.args)})")
            case ast.For() | ast.While():
                used.append(f"a {type(node).__name__.lower()} loop")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                used.append(name)
    parts = [f"define {', '.join(defined[:MAX_NAMES])}"] if defined else []
    parts += [f"use {', '.join(list(dict.fromkeys(used))[:MAX_NAMES])}"] if used else []
    return ", ".join(parts) or "compute it in one line"


def _first_sentence(statement: str) -> str:
    line = next(filter(None, map(str.strip, statement.splitlines())), "")
    return line.split(". ")[0].rstrip(".")[:MAX_ASKED_CHARS]
