"""A program is found in an answer, and its outputs are compared as the data sets do."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from moored.envs.code.judge import (
    MAX_PROGRAM_CHARS,
    find_program,
    judge,
    passes,
    same_output,
    same_value,
)
from moored.envs.code.problem import Case, Problem
from moored.envs.code.sandbox import Outcome, SandboxPool

DOUBLE = Problem(
    statement="Double it.",
    kind="stdin",
    cases=(Case("1\n", "2"), Case("5\n", "10"), Case("0\n", "0"), Case("-3\n", "-6")),
    key="double",
    solution="print(2 * int(input()))",
)
PAIR = Problem(
    statement="Return (x, x).",
    kind="call",
    entry="pair",
    cases=(Case([1], (1, 1)), Case(["a"], ("a", "a"))),
    key="pair",
    solution="def pair(x): return x, x",
)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("```python\r\nprint(1)\r\n```", "print(1)"),
        ("First ```py\nx = 1\n``` and then ```python\nprint(2)\n``` so.", "print(2)"),
        ("print(", None),
        ("here is my program: print(1)", None),
        ("", None),
        ("```python\n```", None),
        ("x = '\x00'", None),
        ("x = '\ud800'", None),
        ("(" * 5000, None),
        ("-" * 30000 + "1", None),
        ("1\n" * MAX_PROGRAM_CHARS, None),
    ],
)
def test_the_program_is_the_last_block_or_the_whole_answer(answer: str, program: str) -> None:
    assert find_program(answer) == program


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("  1 2", "1 2\n", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1 2 3", "1 2", False),
        ("", "", True),
        ("", "0", False),
        ("yes", "YES", False),
        ("1.0", "1.00", True),
        ("1", "1.0", True),
        ("1e2", "100", True),
        ("100000", "100001", False),
        ("0.333333", "0.333334", False),
        ("nan", "nan", True),
        ("nan", "1", False),
        ("inf", "1e400", False),
        ("1e400", "1e-400", False),
        ("x" * 1000, "1", False),
    ],
)
def test_outputs_are_compared_by_line_and_numbers_by_value(
    output: str, expected: str, is_same: bool
) -> None:
    assert same_output(output, expected) is is_same


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("0.333333", "0.333334", True),  # they differ by 3 parts in a million
        ("0.33333", "0.33434", False),
        ("1000001", "1000000", False),  # whole numbers are exact
        ("1000001", "1000000.0", True),
        ("0.00000000001", "0.0", True),
    ],
)
def test_a_tolerance_is_for_numbers_with_a_decimal_point(
    output: str, expected: str, is_same: bool
) -> None:
    assert same_output(output, expected, 1e-5) is is_same


def test_values_are_compared_as_python_does_and_floats_with_the_tolerance() -> None:
    assert same_value([1, (2, "x")], [1, (2, "x")])
    assert not same_value([1, 2], (1, 2))
    assert not same_value([0.1 + 0.2], [0.3])
    assert same_value([0.1 + 0.2], [0.3], 1e-5)
    assert not same_value([1, 2], [1, 2, 3], 1e-5)
    assert same_value(2, 2.0)
    assert not same_value(10**400, 1.0, 1e-5)


def test_the_share_of_passed_tests_is_counted(pool: SandboxPool) -> None:
    verdict = judge("print(abs(2 * int(input())))", DOUBLE, pool, wall_s=5.0)
    assert (verdict.num_passed, verdict.num_tests, verdict.share) == (3, 4, 0.75)
    assert verdict.failure == "Test 4 gave a wrong result."
    verdict = judge("x = int(input())\nprint(2 * x if x else 1 // x)", DOUBLE, pool, wall_s=5.0)
    assert (verdict.num_passed, verdict.failure) == (3, "Test 3 raised ZeroDivisionError.")


def test_a_time_out_fails_the_tests_after_it(pool: SandboxPool) -> None:
    source = "x = int(input())\nwhile x == 5: pass\nprint(2 * x)"
    verdict = judge(source, DOUBLE, pool, wall_s=0.3)
    assert (verdict.num_passed, verdict.is_late) == (1, True)
    assert verdict.failure == "Test 2 ran out of time."


def test_what_cannot_pass_is_not_run() -> None:
    closed = SandboxPool()  # running anything in it would raise
    assert judge("9**9**9**9", DOUBLE, closed, wall_s=5.0).failure == "The program prints nothing."
    verdict = judge("def double(x): return x, x", PAIR, closed, wall_s=5.0)
    assert verdict.failure == "The program has no function pair."
    assert not judge("print(", PAIR, closed, wall_s=5.0).is_program


def test_a_list_counts_as_a_tuple_only_where_the_data_set_knows_no_tuples(
    pool: SandboxPool,
) -> None:
    source = "def pair(x): return [x, x]"
    assert judge(source, PAIR, pool, wall_s=5.0).is_right
    assert judge(source, replace(PAIR, keeps_types=True), pool, wall_s=5.0).num_passed == 0
    assert judge(PAIR.solution, replace(PAIR, keeps_types=True), pool, wall_s=5.0).is_right


def test_an_object_that_equals_everything_is_not_a_result(pool: SandboxPool) -> None:
    source = "class X(tuple):\n    __eq__ = lambda a, b: True\ndef pair(x): return X()"
    assert judge(source, PAIR, pool, wall_s=5.0).num_passed == 0
    source = "class X:\n    __eq__ = lambda a, b: True\ndef pair(x): return X()"
    assert judge(source, PAIR, pool, wall_s=5.0).num_passed == 0


@pytest.mark.parametrize(
    "value",
    [
        '{"complex": [1%s, 0]}' % ("0" * 400),
        '{"complex": ["1", "2"]}',
        '{"complex": [1, 2, 3]}',
        '{"bytes": "x"}',
        '{"bytes": 1}',
        '{"set": [[]]}',
        '{"set": 1}',
        '{"set": [{"set": [1]}]}',
        '{"dict": [[[], 1]]}',
        '{"dict": [[1]]}',
        '{"dict": [1]}',
        '{"dict": 1}',
        '{"tuple": [], "set": []}',
        '{"other": []}',
        "{}",
        "[1" + "0" * 5000 + "]",
        "[" * 5000 + "]" * 5000,
        "[" * 900 + "]" * 900,
        '{"tuple": [' * 300 + "]}" * 300,
        '{"dict": [[1, ' * 200 + "1" + "]]}" * 200,
        "[",
        "\x00",
        "",
        "\udc80",
    ],
)
@pytest.mark.parametrize("expected", [(1, 2), 1.5, {1, 2}, {1: 2.5, 3: [4]}, [[[{1}]]]])
@pytest.mark.parametrize("keeps_types", [True, False])
def test_whatever_a_program_sends_as_a_value_is_judged(
    value: str, expected: object, keeps_types: bool
) -> None:
    problem = replace(PAIR, keeps_types=keeps_types, tolerance=1e-5)
    outcome = Outcome("done", value.encode("utf-8", "surrogateescape"))
    assert not passes(outcome, Case([1], expected, or_list=True), problem)


def test_a_complex_number_of_a_type_of_the_program_counts_as_its_base(pool: SandboxPool) -> None:
    problem = replace(PAIR, cases=(Case([1], 1 + 2j),))
    source = "class X(complex):\n    real = 10**400\ndef pair(x): return X(1, 2)"
    assert judge(source, problem, pool, wall_s=5.0).is_right
    forged = (
        "import os\nmessage = b'{\"complex\": [%d, 0]}' % (10**400)\n"
        "def pair(x): os.write(60, len(message).to_bytes(4, 'big') + b'D' + message)"
    )
    assert judge(forged, problem, pool, wall_s=5.0).num_passed == 0


@pytest.mark.parametrize("kind", ["set", "dict"])
@pytest.mark.parametrize("expected", [{0, 1}, {0: 1, 1: 1}, [1]])
def test_results_of_one_hash_cost_no_more_than_others(kind: str, expected: object) -> None:
    numbers = [(2**61 - 1) * factor for factor in range(30_000)]
    assert len({hash(number) for number in numbers}) == 1
    parts = numbers if kind == "set" else [[number, 1] for number in numbers]
    outcome = Outcome("done", json.dumps({kind: parts}).encode())
    start_s = time.process_time()
    assert not passes(outcome, Case([1], expected), PAIR)
    assert time.process_time() - start_s < 2.0  # 5 s and 10 s in those of Python


@pytest.mark.parametrize(
    ("sent", "expected", "is_right"),
    [
        ('{"set": [2, 1.0]}', {1, 2}, True),
        ('{"set": [1, 1, 2]}', {1, 2}, True),
        ('{"set": [1, 1]}', {1, 2}, False),
        ('{"set": [1, 2, 3]}', {1, 2}, False),
        ('{"set": []}', set(), True),
        ('{"set": []}', [], False),
        ("[1, 2]", {1, 2}, False),
        ('{"set": [{"tuple": [1, 2]}]}', {(1, 2)}, True),
        ('{"dict": [["a", {"tuple": [1]}], ["b", {"set": [1]}]]}', {"b": {1}, "a": [1]}, True),
        ('{"dict": [["a", {"dict": []}]]}', {"a": {}}, True),
        ('{"dict": [["a", 1], ["a", 2]]}', {"a": 2}, True),
        ('{"dict": [["a", 1]]}', {"a": 1, "b": 2}, False),
        ('{"dict": [["a", 1], ["b", 2]]}', {"a": 1}, False),
        ('{"dict": [["a", 1]]}', {"a": 2}, False),
        ('{"dict": []}', {"set"}, False),
        ('[{"dict": [[1, 1.5]]}]', [{1: 1.5}], True),
    ],
)
def test_sets_and_dictionaries_are_compared_as_python_does(
    sent: str, expected: object, is_right: bool
) -> None:
    assert passes(Outcome("done", sent.encode()), Case([1], expected), PAIR) is is_right
