"""The reasoning-gym adapter against the real package: tasks, scores, hostile answers."""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moored.envs import format_reply
from moored.envs.adapters import ReasoningGym
from moored.envs.adapters.reasoning_gym_worker import (
    BOMB,
    CONSTANT_ANSWERS,
    FORMULA,
    GUARDS,
    PLAIN,
    names_in,
)
from moored.envs.base import SPLIT_SEEDS
from moored.errors import EnvError
from moored.types import messages_digest

VALIDATION, TEST = SPLIT_SEEDS["validation"].start, SPLIT_SEEDS["test"].start


def answer(text: object) -> str:
    return format_reply("", str(text))


DATASETS = (
    "chain_sum",
    "countdown",
    "game_of_life",
    "graph_color",
    "knights_knaves",
    "letter_counting",
    "list_functions",
    "mini_sudoku",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "pool_matrix",
    "propositional_logic",
    "ransom_note",
    "shortest_path",
    "spiral_matrix",
    "string_insertion",
    "syllogism",
)


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_reference_answer_earns_1_and_nonsense_less(dataset: str) -> None:
    env = ReasoningGym(dataset=dataset)
    for task in (0, 1, VALIDATION):
        env.reset(task)
        result = env.step(answer(env.oracle()))
        assert (result.reward, result.terminated, result.success) == (1.0, True, True)
        assert not any(result.metrics.values())
        env.reset(task)
        nonsense = env.step(answer("NO IDEA"))
        assert nonsense.is_valid and not nonsense.success
        assert 0.0 <= nonsense.reward < 0.3


def test_a_sum_worked_out_from_the_question_earns_1() -> None:
    env = ReasoningGym(config={"min_terms": 3, "max_terms": 4})
    for task in range(5):
        question = env.reset(task)[1].text
        terms = re.findall(r"([+-]?) ?(\d+)", question[question.index(":") :])
        total = sum(int(sign + digits) for sign, digits in terms)
        assert len(terms) in (3, 4)
        assert env.step(answer(total)).reward == 1.0
        env.reset(task)
        assert env.step(answer(total + 1)).reward == 0.0


def test_a_malformed_reply_to_a_question_costs_the_penalty() -> None:
    env = ReasoningGym(format_penalty=-0.5)
    assert "-0.5" in env.reset(0)[0].text
    result = env.step("42")
    assert (result.reward, result.is_valid, result.terminated) == (-0.5, False, True)
    with pytest.raises(EnvError, match="call reset"):
        env.step("42")
    with pytest.raises(EnvError, match="call reset"):
        env.oracle()


HASH_SENSITIVE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
GLOBAL_RANDOM_USERS = ("codeio", "pool_matrix")


def first_digests() -> list[str]:
    return [
        messages_digest(ReasoningGym(dataset=dataset).reset(task))
        for dataset in (*HASH_SENSITIVE, *GLOBAL_RANDOM_USERS)
        for task in range(4)
    ]


def test_questions_are_the_same_in_another_process_with_another_hash_seed() -> None:
    here = "\n".join(first_digests())
    code = f"import runpy; print(*runpy.run_path({__file__!r})['first_digests'](), sep='\\n')"
    there = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here


def test_global_generators_are_left_alone() -> None:
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    for dataset in GLOBAL_RANDOM_USERS:
        env = ReasoningGym(dataset=dataset)
        env.reset(0)
        env.step(answer(env.oracle()))
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before


def test_splits_share_no_question_in_a_small_dataset() -> None:
    env = ReasoningGym(dataset="prime_factorization", config={"max_value": 130})
    splits = [
        {env.reset(first + offset)[1].text for offset in range(50)}
        for first in (0, VALIDATION, TEST)
    ]
    assert sum(map(len, splits)) < 150  # a small dataset: questions repeat
    assert not splits[0] & splits[1] and not splits[0] & splits[2] and not splits[1] & splits[2]


EVALUATING = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


@pytest.mark.parametrize("dataset", sorted(EVALUATING - {"puzzle24", "intermediate_integration"}))
def test_code_in_an_answer_is_not_run(dataset: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    env = ReasoningGym(dataset=dataset)
    for code in (f"open({str(trap)!r}, 'w')", f"[open({str(trap)!r}, 'w')]"):
        env.reset(0)
        result = env.step(answer(code))
        assert result.metrics["answers_refused"] == 1.0
        assert result.reward == 0.0
    assert not trap.exists()


def test_the_name_of_a_variable_of_the_scorer_earns_nothing() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("string_insertion", size=1, seed=0)
    assert dataset.score_answer("oracle_answer", dataset[0]) == 0.1  # why there is a guard
    env = ReasoningGym(dataset="string_insertion")
    env.reset(0)
    result = env.step(answer("oracle_answer"))
    assert (result.reward, result.metrics["answers_refused"]) == (0.0, 1.0)


def test_scorers_that_evaluate_answers_are_known() -> None:
    from reasoning_gym.factory import DATASETS as ALL

    found = {
        name
        for name, (cls, _) in ALL.items()
        if names_in(cls.score_answer.__code__) & GUARDS.keys()
    }
    assert found == EVALUATING
    # Modules that evaluate text elsewhere: their own, never the answer.
    calls = re.compile(r"(?<![\w.])(?:eval|exec|sympify)\(|parse_expr\(")
    modules = {
        name
        for name, (cls, _) in ALL.items()
        if calls.search(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
    }
    own = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "propositional_logic"}
    assert modules - found == own


@pytest.mark.parametrize(
    ("guard", "text", "passes"),
    [
        (PLAIN, "[['Q', '_'], ['_', 'Q']]", True),
        (PLAIN, "1 2 -3 4.5", True),
        (PLAIN, "QUIT()", False),
        (PLAIN, "entry", False),
        (PLAIN, "9*9", False),
        (FORMULA, "-2*(9*x - 8)**(3/2) + exp(x)*sin(2.5*x)/log(X) + C", True),
        (FORMULA, "(61 - 6) * 4", True),
        (FORMULA, "x.n", False),
        (FORMULA, "eval(x)", False),
        (FORMULA, "ｅｖａｌ(x)", False),
        (FORMULA, "Integral(x, x)", False),
        (FORMULA, "exec", False),
        (FORMULA, "sinexp(x)", False),
        (FORMULA, "x_y", False),
        (FORMULA, "1" * 8000 + "!", False),
    ],
)
def test_guards_pass_answers_and_stop_code(guard: re.Pattern, text: str, passes: bool) -> None:
    assert bool(guard.fullmatch(text)) is passes


@pytest.mark.parametrize(
    ("text", "is_bomb"),
    [
        ("1e999999999", True),
        ("2.5E-99999", True),
        ("9**9**9", True),
        ("9**(9**9)", True),
        ("x**99999", True),
        ("0x1e1234", False),
        ("1e10", False),
        ("x**2 * y**3 + 10**6", False),
    ],
)
def test_astronomical_numbers_are_told_from_others(text: str, is_bomb: bool) -> None:
    assert bool(BOMB.search(text)) is is_bomb


def test_an_astronomical_number_does_not_reach_the_scorer() -> None:
    env = ReasoningGym(dataset="prime_factorization")
    env.reset(0)
    result = env.step(answer("1e999999999"))
    assert (result.reward, result.metrics["answers_refused"]) == (0.0, 1.0)


def test_endless_scoring_is_stopped_and_the_next_task_works() -> None:
    env = ReasoningGym(dataset="rush_hour", time_limit_s=0.2)
    env.reset(0)
    result = env.step(answer("A+999999999999"))
    assert result.metrics["scorer_timeouts"] == 1.0
    assert (result.reward, result.is_valid) == (0.0, True)
    env.reset(0)
    assert env.step(answer("A+1")).metrics["scorer_timeouts"] == 0.0


def test_a_failing_scorer_is_counted() -> None:
    env = ReasoningGym(dataset="prime_factorization")
    env.reset(0)
    result = env.step(answer("two times three"))
    assert (result.reward, result.metrics["scorer_errors"]) == (0.0, 1.0)


def test_a_long_answer_is_refused() -> None:
    env = ReasoningGym(dataset="letter_counting")
    for length, refused in ((8192, 0.0), (8193, 1.0), (1_000_000, 1.0)):
        env.reset(0)
        assert env.step(answer("a" * length)).metrics["answers_refused"] == refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "composite"}, "mix environments instead"),
        ({"config": {"min_term": 2}}, "chain_sum cannot be made with config .*min_term"),
        ({"config": {"min_terms": 0}}, "min_terms must be positive"),
        ({"time_limit_s": 0.0}, "time_limit_s must be positive, got 0"),
    ],
)
def test_wrong_questions_say_what_was_wrong(options: dict, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        ReasoningGym(**options).reset(0)


@pytest.mark.parametrize("dataset", CONSTANT_ANSWERS)
def test_a_dataset_that_one_answer_solves_is_refused(dataset: str) -> None:
    from reasoning_gym.factory import create_dataset

    tasks = create_dataset(dataset, seed=0, size=50)
    scores = [tasks.score_answer(CONSTANT_ANSWERS[dataset], task) for task in tasks]
    assert np.mean(scores) > 0.9
    with pytest.raises(EnvError, match=f"{dataset} cannot be learnt"):
        ReasoningGym(dataset=dataset).reset(0)


@pytest.mark.parametrize("dataset", ["boxnet", "rush_hour"])
def test_a_dataset_without_reference_answers_has_no_oracle(dataset: str) -> None:
    env = ReasoningGym(dataset=dataset)
    env.reset(0)
    with pytest.raises(EnvError, match="without reference answers"):
        env.oracle()
