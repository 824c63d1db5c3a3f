"""Any task of the reasoning-gym package: one question, one answer, scored by the package.

The package runs in a child process (`reasoning_gym_worker`). Some of its generators depend on the
hash seed or set the global generators, and some of its scorers never end on some answers; in a
child the hash seed is fixed, nothing is shared, and what takes too long is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from moored.envs.adapters.reasoning_gym_worker import Task, Verdict
from moored.envs.adapters.turns import PackageChild
from moored.envs.base import FORMAT_REMINDER, StepResult
from moored.envs.worker import WorkerLost
from moored.errors import EnvError, require_packages
from moored.reply import parse_reply
from moored.types import Message

SUCCESS_SCORE = 0.99
DATASET_LIMIT_S = 120.0
"""For a request that has to build its dataset first; scoring alone has `time_limit_s`."""

_CHILD = PackageChild("reasoning_gym", "moored.envs.adapters.reasoning_gym_worker")


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
    main_option: ClassVar[str] = "dataset"
    is_stochastic: ClassVar[bool] = False
    max_turns: ClassVar[int] = 1

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
        require_packages("environment reasoning_gym", ("reasoning_gym",))
        self.dataset = dataset
        self.config = dict(config or {})
        self.time_limit_s = time_limit_s
        self.format_penalty = format_penalty
        self._task: Task | None = None

    def check_available(self) -> None:
        self._draw(0)

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._task = None
        self._task = task = self._draw(task_seed)
        system = (
            f"Solve the problem. A right answer earns 1, any other less, a malformed reply "
            f"{self.format_penalty:g}. You have one turn. Between the answer tags write the answer "
            f"alone, in the form the problem asks for.\n{FORMAT_REMINDER}."
        )
        return [Message("system", system), Message("user", task.question)]

    def step(self, reply: str) -> StepResult:
        task, self._task = self._task, None
        if task is None:
            raise EnvError("reasoning_gym: the episode is over; call reset before step")
        answer = parse_reply(reply).answer
        if answer is None:
            return StepResult(
                observation=f"Malformed reply. Reward: {self.format_penalty:g}.",
                reward=self.format_penalty,
                penalty=self.format_penalty,
                terminated=True,
                is_valid=False,
            )
        verdict = self._score(task, answer)
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

    def _draw(self, task_seed: int) -> Task:
        try:
            return _CHILD.ask(DATASET_LIMIT_S, "draw", self.dataset, self.config, task_seed)
        except WorkerLost as lost:
            raise EnvError(
                f"reasoning_gym: the child process was lost over a task of {self.dataset}: {lost}"
            ) from lost

    def _score(self, task: Task, answer: str) -> Verdict:
        request = "score", self.dataset, self.config, task.index, answer, self.time_limit_s
        try:
            return _CHILD.ask(DATASET_LIMIT_S, *request)
        except WorkerLost as lost:
            return Verdict(0.0, "timeout" if lost.is_late else "error")
