"""Any task of the reasoning-gym package: one question, one answer, scored by the package.

The package runs in a child process (`reasoning_gym_worker`). Some of its generators depend on the
hash seed or set the global generators, and some of its scorers can be made to run for ever; in a
child the hash seed is fixed, nothing is shared, and what takes too long is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from moored.envs.base import FORMAT_REMINDER, StepResult
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

SUCCESS_SCORE = 0.99
EXIT_CODE_LATE = -int(getattr(signal, "SIGALRM", 0))
WORKER = "moored.envs.adapters.reasoning_gym_worker"


@dataclass(frozen=True, slots=True)
class Task:
    """One question: where it stands in its dataset, its text, and an answer that scores 1."""

    index: int
    question: str
    reference: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What scoring an answer came to."""

    score: float
    outcome: Literal["scored", "refused", "error", "timeout"]


class ReasoningGym:
    """Any task of reasoning-gym by name: one question, one answer (needs `moored[gym]`).

    Reward: reasoning-gym's own score of the answer, from 0 to 1; −0.1 for a malformed reply.
    Success is a score of at least 0.99. The one answer is judged, so every episode is terminated,
    never truncated.

    Options:
        dataset ("chain_sum"): a name of reasoning-gym's list, such as "sudoku", "word_ladder",
            "knights_knaves", "game_of_life", "number_sorting".
        config: keywords of that dataset, such as {"min_terms": 3, "max_terms": 5}; its `size` is
            the number of tasks all splits share out (2**20, fewer where the dataset builds them
            in advance), its `seed` (0) gives other ones.
        time_limit_s (2.0): scoring that takes longer is stopped (not on Windows).
        format_penalty (−0.1): reward of a malformed reply.

    An answer scores 0, and a metric counts it, when it has over 8,192 characters or could be run
    as code by the scorer (`answers_refused`), when the scorer fails on it (`scorer_errors`) and
    when scoring takes too long (`scorer_timeouts`).
    """

    name: ClassVar[str] = "reasoning_gym"
    is_stochastic: ClassVar[bool] = False

    def __init__(
        self,
        *,
        dataset: str = "chain_sum",
        config: Mapping[str, object] | None = None,
        time_limit_s: float = 2.0,
        format_penalty: float = -0.1,
    ) -> None:
        if time_limit_s <= 0:
            raise EnvError(f"reasoning_gym: time_limit_s must be positive, got {time_limit_s}")
        self.max_turns = 1
        self.dataset = dataset
        self.config = dict(config or {})
        self.time_limit_s = time_limit_s
        self.format_penalty = format_penalty
        self._task: Task | None = None

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._task = None
        self._task = _CHILD.draw(self.dataset, self.config, task_seed)
        system = (
            f"Solve the problem. A right answer earns 1, any other less, a malformed reply "
            f"{self.format_penalty:g}. You have one turn. Between the answer tags write the answer "
            f"alone, in the form the problem asks for.\n{FORMAT_REMINDER}."
        )
        return [Message("system", system), Message("user", self._task.question)]

    def step(self, reply: str) -> StepResult:
        task, self._task = self._task, None
        if task is None:
            raise EnvError("reasoning_gym: the episode is over; call reset before step")
        answer = parse_reply(reply).answer
        if answer is None:
            return StepResult(
                observation=f"Malformed reply. Reward: {self.format_penalty:g}.",
                reward=self.format_penalty,
                terminated=True,
                is_valid=False,
            )
        verdict = _CHILD.score(
            self.dataset, self.config, task.index, answer, limit_s=self.time_limit_s
        )
        return StepResult(
            observation=f"Reward: {verdict.score:g}.",
            reward=verdict.score,
            terminated=True,
            success=verdict.score >= SUCCESS_SCORE,
            metrics={
                "answers_refused": float(verdict.outcome == "refused"),
                "scorer_errors": float(verdict.outcome == "error"),
                "scorer_timeouts": float(verdict.outcome == "timeout"),
            },
        )

    def oracle(self) -> str:
        if self._task is None:
            raise EnvError("reasoning_gym: there is no open question; call reset before oracle")
        if self._task.reference is None:
            raise EnvError(
                f"reasoning_gym: {self.dataset} comes without reference answers; choose another "
                f"dataset where demonstrations are needed"
            )
        return self._task.reference

    def close(self) -> None:
        self._task = None


class _Child:
    """The child process and its life: started at first use, replaced when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0

    def draw(self, dataset: str, config: Mapping[str, object], task_seed: int) -> Task:
        reply = self._ask("draw", dataset, config, task_seed)
        if isinstance(reply, int):
            raise EnvError(
                f"reasoning_gym: the child process ended with code {reply} over {dataset}; try "
                f"`python -c 'import reasoning_gym'`"
            )
        return Task(**reply)

    def score(
        self,
        dataset: str,
        config: Mapping[str, object],
        index: int,
        answer: str,
        *,
        limit_s: float,
    ) -> Verdict:
        reply = self._ask("score", dataset, config, index, answer, limit_s)
        if isinstance(reply, int):
            return Verdict(0.0, "timeout" if reply == EXIT_CODE_LATE else "error")
        return Verdict(**reply)

    def stop(self) -> None:
        """End the child; after a fork it belongs to the other process and is left alone."""
        process, self._process = self._process, None
        if process is not None and self._owner_pid == os.getpid():
            process.kill()
            process.communicate()

    def _ask(self, *request: object) -> dict | int:
        """Send a request and return the reply, or the exit code when the child ended instead."""
        data = pickle.dumps(request)
        with self._lock:
            process = self._living_process()
            assert process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(data)
                    process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # Ctrl-C: the next request must not read this one's reply
                self.stop()
                raise
            if not line:
                return process.wait()
        reply = json.loads(line)
        if "problem" in reply:
            raise EnvError(f"reasoning_gym: {reply['problem']}")
        return reply

    def _living_process(self) -> subprocess.Popen[bytes]:
        if self._process and self._owner_pid == os.getpid() and self._process.poll() is None:
            return self._process
        self.stop()
        if importlib.util.find_spec("reasoning_gym") is None:
            raise EnvError("reasoning-gym is not installed; pip install 'moored[gym]'")
        settings = {
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"import {WORKER} as w; w.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | settings,
        )
        self._owner_pid = os.getpid()
        return self._process


_CHILD = _Child()
atexit.register(_CHILD.stop)
