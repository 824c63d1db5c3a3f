"""Generated problems: many, different, each solved by its oracle, and apart by split."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from moored.envs.base import SPLIT_SEEDS, split_of_content
from moored.envs.code.env import Code
from moored.envs.code.families import FAMILIES
from moored.envs.code.generate import MIN_ANSWERS, NUM_TESTS, Draft, draw_draft, make_problem
from moored.envs.code.judge import judge
from moored.envs.code.problem import Problem
from moored.envs.code.sandbox import SandboxPool

PER_FAMILY = 8


def problems() -> list[Problem]:
    """Eight problems of each family."""
    rng = random.Random(0)
    drafts = [
        Draft(family, {name: rng.choice(values) for name, values in family.parameters.items()})
        for family in FAMILIES
        for _ in range(PER_FAMILY)
    ]
    return [make_problem(draft, rng) for draft in drafts]


def test_there_are_over_two_hundred_problems_in_over_fifteen_families() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 15
    assert min(math.prod(map(len, family.parameters.values())) for family in FAMILIES) >= 10
    drafts = {draw_draft(random.Random(seed), (1, 3)).key for seed in range(1000)}
    assert len(drafts) >= 200


def test_the_oracle_solves_more_than_two_hundred_problems(pool: SandboxPool) -> None:
    made = problems()
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(
            threads.map(lambda x: judge(x.solution, x, pool, wall_s=10.0), made, chunksize=1)
        )
    unsolved = [x.key for x, verdict in zip(made, verdicts, strict=True) if not verdict.is_right]
    assert len(made) >= 200
    assert unsolved == []


def test_no_constant_passes_many_tests() -> None:
    for problem in problems():
        answers = [repr(case.expected) for case in problem.cases]
        assert len(answers) == NUM_TESTS
        assert len(set(answers)) >= MIN_ANSWERS, problem.key


def test_a_statement_shows_two_examples_and_hides_the_other_tests() -> None:
    problem = make_problem(Draft(FAMILIES[0], {"a": 3, "b": 5}), random.Random(1))
    assert problem.statement == (
        "The input is one line: two integers a and b, separated by a space. Print 3 times a plus "
        "5 times b.\nInput: -33 22\nOutput: 11\nInput: 47 -42\nOutput: -69"
    )
    assert problem.solution == "a, b = map(int, input().split())\nprint(3 * a + 5 * b)"


def test_both_forms_of_a_problem_belong_to_one_split() -> None:
    env = Code()
    for split, seeds in SPLIT_SEEDS.items():
        for seed in seeds[:100]:
            env.reset(seed)
            assert env._problem is not None
            assert split_of_content(env._problem.key) == split


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_level_restricts_the_families(level: int) -> None:
    names = {family.name for family in FAMILIES if family.level == level}
    found = {draw_draft(random.Random(seed), (level, level)).family.name for seed in range(200)}
    assert found == names
