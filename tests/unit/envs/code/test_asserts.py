"""Tests that assert run in a process of their own: no wrong program passes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.envs.code.judge import judge
from moored.envs.code.rows import load_problems, read_humaneval, read_mbpp
from moored.envs.code.sandbox import Job, Outcome, SandboxPool

HALF = {
    "prompt": 'def half(x):\n    """Half of x."""\n',
    "entry_point": "half",
    "canonical_solution": "    return x / 2\n",
    "test": """
def check(candidate):
    assert abs(candidate(1) - 0.5) < 1e-6
    assert abs(candidate(3) - 1.5) < 1e-6
    assert True
""",
}
WRONG = "def half(x): return 9.0\n"
ANY = """
class Any(float):
    __sub__ = __abs__ = lambda self, other=0: self
    __eq__ = __lt__ = lambda self, other: True
def half(x): return Any()
"""
FORGE = """
import os, sys
def forge(*given):
    frame = sys._getframe()
    while frame and "job" not in frame.f_locals:
        frame = frame.f_back
    token = frame.f_locals["job"]["token"] if frame else b""
    os.write(60, len(token).to_bytes(4, "big") + b"D" + token)
    return 9.0
"""
WRONG_PROGRAMS = {
    "its own abs": "abs = lambda x: 0\n" + WRONG,
    "abs replaced": "import builtins\nbuiltins.abs = lambda x: 0\n" + WRONG,
    "its own builtins": "__builtins__ = {'abs': lambda x: 0}\n" + WRONG,
    "exec replaced": """
import builtins
run = builtins.exec
def skip(code, *given):
    return None if code.co_filename == "test.py" else run(code, *given)
builtins.exec = skip
"""
    + WRONG,
    "compile replaced": (
        "import builtins\ncode = compile('', '', 'exec')\n"
        "builtins.compile = lambda *given, **options: code\n" + WRONG
    ),
    "a verdict forged in a call": FORGE + "half = forge\n",
    "a verdict forged at once": FORGE + "forge()\n" + WRONG,
    "a verdict forged blindly": "import os\nos.write(60, b'\\0\\0\\0\\0D')\n" + WRONG,
    "failures told as passes": (
        FORGE + "sys.modules['__main__'].report = forge\ndef half(x): return 9.0\n"
    ),
    "a jump to the last line": """
import sys
def jump(frame, event, argument):
    if event == "line" and frame.f_code.co_filename == "test.py":
        frame.f_lineno = 5
        sys.settrace(None)
    return jump
def half(x):
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "check":
        frame = frame.f_back
    if frame:
        sys.settrace(jump)
        frame.f_trace = jump
    return 0.5
""",
    "constants overwritten": """
import ctypes, gc, sys
def half(x):
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "check":
        frame = frame.f_back
    for value in frame.f_code.co_consts if frame else ():
        if value == 1e-6:
            ctypes.c_double.from_address(id(value) + 16).value = 1e9
    return 9.0
""",
    "expected values read": """
import sys
numbers = []
def half(x):
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "check":
        frame = frame.f_back
    numbers.append(x)
    consts = frame.f_code.co_consts if frame else [9.0, 9.0]
    return [x for x in consts if isinstance(x, float) and x > 0.1][len(numbers) - 1]
""",
    "a result equal to all": ANY,
    "a result equal to all, let through": (
        "import sys\nsys.modules['__main__'].only_plain = lambda function: function\n" + ANY
    ),
    "an early end": "import os\ndef half(x): os._exit(0)\n",
}


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_no_wrong_program_deceives_a_test_that_asserts(name: str, pool: SandboxPool) -> None:
    problem = read_humaneval(HALF)
    assert problem.kind == "assert"
    assert judge(WRONG_PROGRAMS[name], problem, pool, wall_s=5.0).num_passed == 0
    assert judge(problem.solution, problem, pool, wall_s=5.0).is_right


def test_values_cross_as_they_are(pool: SandboxPool) -> None:
    source = "def f(*given): return given[0] if len(given) == 1 else given"
    tests = (
        "for x in (1, -2.5, float('inf'), True, None, 'ü\\n', b'a', 1j): assert f(x) == x",
        "for x in ((1, [2]), {1: {'k': (3,)}}, {4, 5}, 10**30): assert f(x) == x",
        "assert type(f(True)) is bool and type(f((1,))) is tuple and f(1, 2) == (1, 2)",
        "assert f(0.5) != 0.5",
    )
    found = pool.run(Job(kind="assert", source=source, entry="f", tests=tests))
    assert [outcome.status for outcome in found] == ["done", "done", "done", "failed"]


def test_what_a_function_raises_ends_the_test_and_not_a_loop_in_it(pool: SandboxPool) -> None:
    source = "def f(x):\n    if x == 2: raise StopIteration\n    return x"
    tests = ("assert f(1) == 1", "assert all(map(lambda x: f(x) == x, [1, 2, 3]))")
    found = pool.run(Job(kind="assert", source=source, entry="f", tests=tests))
    assert found[1] == Outcome("failed", b"StopIteration")
    assert found[0].status == "done"


@pytest.mark.parametrize(
    ("source", "statuses"),
    [
        ("import os\nos.write(60, b'\\0\\0\\0\\0C')\ndef f(x): return x", ["lost", "lost"]),
        (
            "import os\nos.write(60, b'\\0\\0\\0\\1DX' * 9)\nwhile True: f = 1",
            ["timed out", "not run"],
        ),
        ("import os\ndef f(x): return x if len(x) == 1 else os._exit(0)", ["lost", "done"]),
        ("def f(x): return 'x' * 2_000_000", ["flooded", "flooded"]),
    ],
)
def test_a_program_that_breaks_the_exchange_fails_the_test(
    source: str, statuses: list[str], pool: SandboxPool
) -> None:
    tests = ("assert f('x' * 200_000) == 'x' * 200_000", "assert f('x') == 'x'")
    job = Job(kind="assert", source=source, entry="f", tests=tests, wall_s=0.5)
    assert [outcome.status for outcome in pool.run(job)] == statuses


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("assert abs(f(1.5)) < 2", "assert"),
        ("x = [3, 1]\nassert f(x) == sorted(x)", "assert"),
        ("assert all(f(x) == 2 * x for x in range(9))", "assert"),
        ("assert f(1) == f(2) == f(list((3, 4)))", "assert"),
        ("x = [3, 1]\nf(x)\nassert x == [1, 3]", "beside"),
        ("assert f(Node(1)) == 1", "beside"),
        ("assert f([1], int) == 1", "beside"),
        ("assert f(lambda: 1) == 1", "beside"),
        ("assert f(x for x in [1]) == 1", "beside"),
        ("assert f(iter([1])) == 1", "beside"),
        ("assert f(1, by=2) == 1", "beside"),
        ("assert list(map(f, [1])) == [1]", "beside"),
        ("assert f is not None and f(1)", "beside"),
        ("assert f(1) == sys.getsizeof(1)", "beside"),
        ("try: f(1)\nexcept ValueError: pass", "beside"),
    ],
)
def test_a_test_that_needs_objects_of_the_program_runs_beside_it(test: str, kind: str) -> None:
    row = {"text": "It.", "code": "def f(x): return x", "test_list": [test, "assert f(1) == 1 + 0"]}
    problem = read_mbpp(row)
    assert problem is not None and problem.kind == kind


def test_rows_with_tests_beside_the_program_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"code": "class N: pass\ndef f(x): return 1", "test_list": ["assert f(N()) == 1"]}
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "task_id": n, "text": f"Return {n}."} for n in (11, 511, 601, 602)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_problems(path, 15)
    assert {split: len(found[split]) for split in found} == {"train": 0, "validation": 1, "test": 1}
    assert "2 rows are not trained on" in caplog.text
