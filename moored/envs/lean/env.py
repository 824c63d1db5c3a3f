"""Proving theorems in Lean 4; a Kimina-compatible server checks the proofs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

from moored.envs.base import (
    FORMAT_REMINDER,
    Resource,
    StepResult,
    check_address,
    draw_task,
    warn_of_missing_splits,
)
from moored.envs.lean.proof import is_proved, opening, read_tactics, whole_code
from moored.envs.lean.server import LeanReport, LeanServer
from moored.envs.lean.theorems import Theorem, load_theorems, make_theorem, split_statement
from moored.envs.teaching import fill
from moored.errors import EnvError
from moored.reply import parse_reply
from moored.types import Message

MAX_SHOWN_ERRORS = 3
MAX_ERROR_CHARS = 400


class Lean:
    """Prove a theorem in Lean 4; a Kimina-compatible server checks the proof.

    Without a `source` the theorems are made: linear arithmetic, propositions, chains of
    implications, lists, in Lean's core language. The answer is the tactics after `:= by`. After a
    wrong proof Lean's first errors are shown, and another one may be tried.

    Reward: 1 for a complete proof, 0 for any other; −0.1 for a malformed reply, which is also one
    without a tactic (comments earn nothing), or with a word that would leave the theorem or its
    proof open, such as `sorry`, `axiom`, `theorem` or `#eval`. Lean must find that the theorem
    rests on no axioms but its own. A proof terminates the episode; the last turn truncates it.

    Options:
        url: the server's address, such as "http://127.0.0.1:8000".
        token_env ("LEAN_SERVER_API_KEY"): environment variable with the server's key, if any.
        source: a JSON, JSONL or Parquet file with a column `formal_statement`, such as miniF2F, and
            `proof` where one is known.
        header: what stands before every theorem, such as "import Mathlib\\n".
        max_turns (3): proofs that may be tried.
        time_limit_s (45): seconds Lean has for one proof; beyond it the proof counts as wrong. Keep
            `rollout.env_timeout_s` (60) at least 15 above it, or the episode is lost first.
        format_penalty (−0.1): reward of a malformed reply.

    A server that dies, hangs, or answers with an error or nonsense costs the episode, not the run.
    """

    name: ClassVar[str] = "lean"
    main_option: ClassVar[str] = "url"
    is_stochastic: bool = False

    def __init__(
        self,
        *,
        url: str,
        token_env: str = "LEAN_SERVER_API_KEY",
        source: str | Path | None = None,
        header: str = "",
        max_turns: int = 3,
        time_limit_s: int = 45,
        format_penalty: float = -0.1,
    ) -> None:
        for option, value in (("max_turns", max_turns), ("time_limit_s", time_limit_s)):
            if value < 1:
                raise EnvError(f"lean: {option} must be at least 1, got {value}")
        check_address("lean", url)
        self.max_turns = max_turns
        self.format_penalty = format_penalty
        self._server = url, token_env, time_limit_s
        self._header = header
        self._theorems = () if source is None else load_theorems(source)
        if source is not None:
            keys = (theorem.key for theorem in self._theorems)
            warn_of_missing_splits(source, f"{len(self._theorems)} theorems", keys)
        self._theorem: Theorem | None = None

    def resources(self) -> dict[str, Resource]:
        return {"server": LeanServer(*self._server)}

    def check_available(self) -> None:
        LeanServer(*self._server).check_reachable()

    def reset(self, task_seed: int, episode_seed: int = 0) -> list[Message]:
        self._theorem, _ = draw_task(task_seed, self._draw, lambda theorem: theorem.key)
        self._turn = 0
        shown = f"{self._header}{self._theorem.header}{self._theorem.statement} := by"
        user = f"```lean\n{shown}\n```\n{self._turn_text()}"
        return [Message("system", self._rules()), Message("user", user)]

    def step(self, reply: str) -> StepResult:
        theorem = self._current("step")
        answer = parse_reply(reply).answer
        tactics = None if answer is None else read_tactics(answer)
        self._turn += 1
        if tactics is None:
            return self._finish(None)
        server: LeanServer = self.server  # pyright: ignore[reportAttributeAccessIssue]
        code = whole_code(self._header + theorem.header, theorem.statement, theorem.name, tactics)
        try:
            report = server.check(code)
        except EnvError:
            self._theorem = None
            raise
        first_line = opening(self._header + theorem.header, theorem.statement).count("\n")
        return self._finish(report, first_line=first_line)

    def oracle(self) -> str:
        theorem = self._current("oracle")
        if not theorem.proof:
            raise EnvError(f"lean: no proof of {theorem.name} is known; its row has none")
        return theorem.proof

    def reasoning(self, answer: str, rng: random.Random) -> str:
        """What is given and to be shown, and the tactic that begins the proof."""
        given, goal = split_statement(self._current("reasoning").statement)
        lead = f"{fill('{Given|I have}', rng)} {given}. " if given else ""
        return f"{lead}{fill('{To show|The goal}', rng)}: {goal}. I try {answer.split()[0]}."

    def close(self) -> None:
        self._theorem = None

    def _current(self, method: str) -> Theorem:
        if self._theorem is None:
            raise EnvError(f"lean: there is no open theorem; call reset before {method}")
        return self._theorem

    def _draw(self, rng: random.Random) -> Theorem:
        return rng.choice(self._theorems) if self._theorems else make_theorem(rng)

    def _finish(self, report: LeanReport | None, *, first_line: int = 0) -> StepResult:
        proved = report is not None and is_proved(report, self._current("step").name)
        truncated = not proved and self._turn >= self.max_turns
        if proved:
            text, reward = "Reward: 1. Proved.", 1.0
        elif report is None:
            text = f"Malformed reply. Reward: {self.format_penalty:g}."
            reward = self.format_penalty
        else:
            text, reward = f"Reward: 0. Not proved.\n{_complaints(report, first_line)}", 0.0
        if proved or truncated:
            self._theorem = None
        return StepResult(
            observation=text if proved or truncated else f"{text}\n{self._turn_text()}",
            reward=reward,
            penalty=reward if report is None else 0.0,
            terminated=proved,
            truncated=truncated,
            is_valid=report is not None,
            success=proved,
            metrics={"lean_timeouts": float(report is not None and report.has_timed_out)},
        )

    def _turn_text(self) -> str:
        return f"Turn {self._turn + 1} of {self.max_turns}.\n{FORMAT_REMINDER}."

    def _rules(self) -> str:
        return (
            "Prove the theorem in Lean 4. Between the answer tags write the tactics that follow "
            "`:= by`, one a line. A complete proof earns 1, anything else 0.\n"
            f"You have {self.max_turns} turns; after a wrong proof you see Lean's errors.\n"
            "A malformed reply, an answer of comments alone, and one with `sorry`, an axiom or a "
            f"command earn {self.format_penalty:g} and use up the turn.\n{FORMAT_REMINDER}."
        )


def _complaints(report: LeanReport, first_line: int) -> str:
    """Lean's first errors, with lines counted within the answer."""
    if report.has_timed_out:
        return "Lean ran out of time."
    errors = [message for message in report.messages if message.severity == "error"]
    shown = [
        f"line {max(message.line - first_line, 1)}: {message.text.strip()[:MAX_ERROR_CHARS]}"
        for message in errors[:MAX_SHOWN_ERRORS]
    ]
    return "\n".join(shown) or "The proof is not complete."
