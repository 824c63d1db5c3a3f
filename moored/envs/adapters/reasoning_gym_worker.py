"""What `ReasoningGym` asks its child process: draw a task, score an answer."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moored.envs.base import draw_task
from moored.envs.worker import die_after
from moored.errors import EnvError, close_match_hint

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

MAX_ANSWER_CHARS = 8192
NUM_TASKS = 1 << 20
FEWER_TASKS = {"acre": 2_000, "word_ladder": 20_000}
"""Datasets that build all tasks in advance, or allow no more."""
CONSTANT_ANSWERS = {"complex_arithmetic": "nan", "coin_flip": "0", "game_of_life_halting": "True"}
"""Datasets whose scorer gives 1, or 0.9 and more on average, to one answer to all tasks."""
REFERENCE_KEYS = ("example_answer", "example_correct_answer", "possible_answer")
"""Where the metadata hold a right answer when there are many."""

# Some scorers call eval on the answer, where the right one is a local variable; others hand it to
# sympy's parse_expr, which ends in eval. What passes here names no variable and calls only the
# functions of school mathematics.
PLAIN = re.compile(r"""[A-Z0-9_\s\[\],.'"+-]*""", re.ASCII)
FUNCTIONS = "a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|[Aa]bs|pi|erf"
FORMULA = re.compile(
    rf"(?:(?:{FUNCTIONS}|[A-Za-z])(?![A-Za-z_])|[0-9]\.?|\.[0-9]|[\s+*/^()-])*", re.ASCII
)
GUARDS = {"eval": PLAIN, "exec": PLAIN, "parse_expr": FORMULA, "sympify": FORMULA}
# Astronomical numbers in a few characters: 1e999999999, 9**9**9.
BOMB = re.compile(r"(?<![\w.])[0-9][0-9.]*[eE][+-]?[0-9]{4}|\*\*[\s(+-]*(?:[0-9]{4}|\w+\s*\*\*)")


@dataclass(frozen=True, slots=True)
class Task:
    """One question: where it stands in its dataset, its text, and an answer that scores 1."""

    index: int
    question: str
    reference: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of scoring an answer."""

    score: float
    outcome: Literal["scored", "refused", "error", "timeout"]


def import_package() -> None:
    """Import the package once, for all processes that answer requests."""
    import reasoning_gym.factory  # noqa: F401


def answer_request(
    request: Literal["draw", "score"], name: str, config: Mapping[str, object], *rest: Any
) -> Task | Verdict:
    """`("draw", dataset, config, task_seed)` or `("score", dataset, config, index, answer, limit)`.

    Scoring that takes longer than its limit in seconds ends the process.
    """
    dataset = load_dataset(name, pickle.dumps(config))
    if request == "draw":
        return draw(dataset, *rest)
    index, answer, limit_s = rest
    entry = entry_at(dataset, index)
    die_after(wall_s=limit_s)
    return score(dataset, entry, answer)


@lru_cache(maxsize=64)
def load_dataset(name: str, config: bytes) -> ProceduralDataset:
    """Make a dataset from its name and pickled options."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name == "composite":
        raise EnvError("composite mixes datasets; mix environments instead, one entry for each")
    if name in CONSTANT_ANSWERS:
        raise EnvError(
            f"{name} cannot be learnt: reasoning-gym's scorer rewards the answer "
            f"{CONSTANT_ANSWERS[name]!r} to every task; choose another dataset"
        )
    if name not in DATASETS:
        raise EnvError(f"there is no dataset {name!r}; {close_match_hint(name, DATASETS)}")
    options = {"seed": 0, "size": FEWER_TASKS.get(name, NUM_TASKS)} | pickle.loads(config)
    try:
        return create_dataset(name, **options)
    except Exception as error:
        raise EnvError(f"{name} cannot be made with config {options}: {error}") from error


def draw(dataset: ProceduralDataset, task_seed: int) -> Task:
    """Choose a task for a seed: its index, question and reference answer."""
    index, _ = draw_task(
        task_seed,
        make=lambda rng: rng.randrange(dataset.config.size),
        key=lambda index: entry_at(dataset, index)["question"],
    )
    entry = entry_at(dataset, index)
    return Task(index, str(entry["question"]), reference(entry))


@lru_cache(maxsize=1024)
def entry_at(dataset: ProceduralDataset, index: int) -> dict:
    """One task of a dataset."""
    # codeio runs programs that draw from the global generators, which this process has to itself.
    random.seed(index)
    np.random.seed(index % (1 << 32))
    try:
        return dataset[index]
    except Exception as error:
        name = type(dataset).__name__
        raise EnvError(f"{name} failed to make task {index}: {error!r}") from error


def reference(entry: dict) -> str | None:
    """An answer that scores 1, as text; None when the dataset gives none."""
    answers = (entry["answer"], *(entry["metadata"].get(key) for key in REFERENCE_KEYS))
    answer = next((answer for answer in answers if answer is not None), None)
    if answer is None:
        return None
    return answer.strip() if isinstance(answer, str) else json.dumps(answer)


def score(dataset: ProceduralDataset, entry: dict, answer: str) -> Verdict:
    """Score an answer by the dataset's own rule; refused and failed ones score 0."""
    if answer != reference(entry) and not is_harmless(dataset, answer):
        return Verdict(0.0, "refused")
    try:
        # A copy: scorers that simulate moves change the metadata.
        value = float(dataset.score_answer(answer, copy.deepcopy(entry)))
    except Exception:
        return Verdict(0.0, "error")
    return Verdict(value, "scored") if 0.0 <= value <= 1.0 else Verdict(0.0, "error")


def is_harmless(dataset: ProceduralDataset, answer: str) -> bool:
    """False when the answer is too long or could make the scorer run it as code."""
    if len(answer) > MAX_ANSWER_CHARS or BOMB.search(answer):
        return False
    names = names_in(type(dataset).score_answer.__code__)
    return all(guard.fullmatch(answer) for name, guard in GUARDS.items() if name in names)


def names_in(code: CodeType) -> set[str]:
    """Global names and attributes a function uses, inner functions included."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)
