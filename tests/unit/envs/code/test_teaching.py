"""What demonstrations of `code` think before they write the program."""

from __future__ import annotations

import random

import pytest

from moored.envs.code.env import explain, outline
from moored.envs.code.families import FAMILIES
from moored.envs.code.generate import Draft, make_problem
from moored.envs.code.problem import Case, Problem


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_reasoning_names_what_is_asked_and_every_parameter_in_the_plan(family) -> None:
    rng = random.Random(0)
    values = {name: choices[-1] for name, choices in family.parameters.items()}
    problem = make_problem(Draft(family, values), rng)
    said = explain(problem, problem.solution, rng)
    asked, plan = said.split(f" {'Plan' if ' Plan: ' in said else 'So'}: ")
    assert family.what.format(**values) in asked
    assert all(str(value) in plan for value in values.values())


def test_reasoning_of_a_data_set_row_names_its_first_sentence_and_what_the_program_uses() -> None:
    program = "def f(x, y):\n    out = []\n    for i in range(x):\n        out.append(i)\n"
    problem = Problem(
        statement="Count up to x. Ignore y.\nA test of it: assert f(1, 2) is None",
        kind="assert",
        cases=(Case("assert f(1, 2) is None"),),
        key="count",
        solution=program,
    )
    said = explain(problem, f"```python\n{program}```", random.Random(0))
    assert " Count up to x. " in said
    assert said.endswith("define f(x, y), use a for loop, range, append.")


def test_an_answer_that_is_not_a_program_has_no_plan() -> None:
    assert outline("I do not know.") == "write it in Python"
    assert outline("1 + 1") == "compute it in one line"
