"""Rows of DeepCoder, HumanEval and MBPP become problems; test rows are never trained on."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from moored.envs.base import SPLIT_SEEDS, Split
from moored.envs.code.env import Code
from moored.envs.code.judge import judge, passes
from moored.envs.code.problem import Case, Problem
from moored.envs.code.rows import load_problems, read_deepcoder
from moored.envs.code.sandbox import Outcome, SandboxPool
from moored.errors import EnvError

DATA = Path(__file__).parents[5] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="real rows are not part of the project")

PRIME_STDIN = {
    "problem": "Add two numbers.",
    "solutions": ["```python\na, b = map(float, input().split())\nprint(a + b)\n```"],
    "tests": json.dumps(
        [
            {"type": "stdin_stdout", "input": "1 2\n", "output": "3.0\n"},
            {"type": "stdin_stdout", "input": "0.1 0.2\n", "output": "0.3\n"},
        ]
    ),
}
PRIME_CALL = {
    "problem": "Reverse a list.",
    "solutions": ["def rev(x): return x[::-1]"],
    "tests": json.dumps(
        [{"type": "function_call", "fn_name": "rev", "input": [[1, 2]], "output": [[2, 1]]}]
    ),
}
TACO = {
    "problem": "Double each number.",
    "solutions": ["for _ in range(int(input())): print(2 * int(input()))"],
    "tests": json.dumps({"inputs": [["2", "4", "5"], "1\n7\n"], "outputs": [["8", "10"], "14\n"]}),
}
TACO_CALL = {
    "problem": "Count the vowels.",
    "solutions": ["def vowels(s): return sum(c in 'aeiou' for c in s)"],
    "tests": json.dumps({"fn_name": "vowels", "inputs": [["abc"], ["xyz"]], "outputs": [[1], [0]]}),
}
LIVE_STDIN = {
    "problem": "Print a third.",
    "starter_code": "",
    "tests": json.dumps(
        [{"input": "1\n", "output": "0.333333", "testtype": "stdin", "metadata": {}}]
    ),
}
LIVE_CALL = {
    "problem": "Two numbers that add up to the target.",
    "starter_code": "class Solution:\n    def twoSum(self, nums: List[int], target: int):",
    "metadata": json.dumps({"func_name": "twoSum"}),
    "tests": json.dumps(
        [{"input": "[2,7,11]\n9\n", "output": "[0, 1]", "testtype": "functional", "metadata": {}}]
    ),
}
TWO_SUM = """
class Solution:
    def twoSum(self, nums: List[int], target: int):
        seen = defaultdict(int)
        for i, x in enumerate(nums):
            if target - x in seen:
                return seen[target - x], i
            seen[x] = i
"""


def write_rows(folder: Path, *rows: Mapping[str, object], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_all(path: Path, max_tests: int = 15) -> list[Problem]:
    return [x for problems in load_problems(path, max_tests).values() for x in problems]


@pytest.mark.parametrize("row", [PRIME_STDIN, PRIME_CALL, TACO, TACO_CALL])
def test_the_solution_of_a_deepcoder_row_passes(
    row: Mapping[str, object], tmp_path: Path, pool: SandboxPool
) -> None:
    [problem] = load_all(write_rows(tmp_path, row))
    assert judge(problem.solution, problem, pool, wall_s=5.0).is_right
    assert not judge("def rev(x): print(x)\nvowels = rev", problem, pool, wall_s=5.0).is_right


def test_livecodebench_functions_are_methods_with_json_arguments(
    tmp_path: Path, pool: SandboxPool
) -> None:
    [problem] = load_all(write_rows(tmp_path, LIVE_CALL))
    assert problem.cases == (Case([[2, 7, 11], 9], [0, 1]),)
    assert problem.statement.endswith(str(LIVE_CALL["starter_code"]))
    assert judge(TWO_SUM, problem, pool, wall_s=5.0).is_right


def test_only_primeintellect_and_taco_have_a_tolerance(tmp_path: Path, pool: SandboxPool) -> None:
    [live] = load_all(write_rows(tmp_path, LIVE_STDIN, name="live.jsonl"))
    [prime] = load_all(write_rows(tmp_path, PRIME_STDIN))
    assert (live.tolerance, prime.tolerance) == (0.0, 1e-5)
    assert not judge("print(1 / 3)", live, pool, wall_s=5.0).is_right
    assert judge("print(0.333333)", live, pool, wall_s=5.0).is_right


def test_a_row_without_a_solution_has_no_oracle(tmp_path: Path) -> None:
    env = Code(source=write_rows(tmp_path, LIVE_STDIN, name="test-0.jsonl"))
    env.reset(SPLIT_SEEDS["test"].start)
    with pytest.raises(EnvError, match="the row gives no solution"):
        env.oracle()


def test_the_longest_tests_are_kept(tmp_path: Path) -> None:
    tests = [{"type": "stdin_stdout", "input": "x" * n, "output": str(n)} for n in (3, 1, 4, 2)]
    path = write_rows(tmp_path, {"problem": "Length.", "tests": json.dumps(tests)})
    [problem] = load_all(path, max_tests=2)
    assert [case.expected for case in problem.cases] == ["3", "4"]


def test_rows_of_a_test_file_are_never_trained_on(tmp_path: Path) -> None:
    path = write_rows(tmp_path, PRIME_STDIN, TACO, name="test-00000-of-00001.jsonl")
    assert {split: len(x) for split, x in load_problems(path, 15).items()} == {
        **{"train": 0, "validation": 0},
        "test": 2,
    }
    with pytest.raises(EnvError, match="has no train rows; some data sets are for testing only"):
        Code(source=path).reset(0)


def test_a_problem_that_is_also_a_test_row_is_not_trained_on(tmp_path: Path) -> None:
    def mbpp(task_id: int, text: str) -> dict[str, object]:
        return {
            **{"task_id": task_id, "text": text, "code": "def f(x): return x"},
            "test_list": ["assert f(1) == 1"],
        }

    path = write_rows(
        tmp_path, mbpp(11, "Return x."), mbpp(700, "Return  x. "), mbpp(701, "Return it.")
    )
    found = load_problems(path, 15)
    assert [len(found[split]) for split in ("train", "validation", "test")] == [1, 0, 2]


def test_rows_are_split_by_content(tmp_path: Path) -> None:
    rows = [{**PRIME_STDIN, "problem": f"Add two numbers, number {i}."} for i in range(300)]
    found = load_problems(write_rows(tmp_path, *rows, rows[0]), 15)
    keys: dict[Split, set[str]] = {split: {x.key for x in found[split]} for split in found}
    assert sum(map(len, keys.values())) == 300
    assert all(keys.values())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"line 1 of .* has the columns question; a row needs problem and"),
        ({"problem": "x", "tests": "{"}, r"no row can be used, the first is line 1 of .*JSONDec"),
        ({"problem": "x", "tests": "[]"}, r"no row can be used, .* \(no tests\)"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    row: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvError, match=message):
        load_all(write_rows(tmp_path, row))


def test_a_row_that_cannot_be_read_costs_that_row_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path, TACO, {"problem": "x", "tests": json.dumps([{"input": "1"}])})
    assert [problem.key for problem in load_all(path)] == [TACO["problem"]]
    assert "left out 1 of 2 rows whose tests cannot be used, the first is line 2" in caplog.text


def test_asserts_of_another_form_run_in_the_sandbox(tmp_path: Path, pool: SandboxPool) -> None:
    row = {
        **{"task_id": 1, "text": "Half.", "code": "def half(x): return x / 2"},
        "test_setup_code": "import math",
        "test_list": ["assert math.isclose(half(1), 0.5)", "assert half(4) == 2"],
    }
    [problem] = load_all(write_rows(tmp_path, row))
    assert (problem.kind, problem.entry) == ("assert", "half")
    assert judge(problem.solution, problem, pool, wall_s=5.0).is_right
    assert judge("def half(x): return 2", problem, pool, wall_s=5.0).num_passed == 1


@pytest.mark.parametrize(("returned", "is_right"), [("[3]", True), ("3", True), ("[4]", False)])
def test_a_result_of_one_value_may_be_that_value_or_a_list_of_it(returned, is_right) -> None:
    """A row with `[3]` means 3 where it wraps results, and the list where it does not."""
    tests = {"fn_name": "odd", "inputs": [[[2, 3, 4]], [[1, 5]]], "outputs": [[3], [1, 5]]}
    problem = read_deepcoder({"problem": "The odd numbers.", "tests": json.dumps(tests)})
    assert problem is not None
    outcome = Outcome("done", returned.encode())
    assert passes(outcome, problem.cases[0], problem) is is_right
    assert passes(Outcome("done", b"[1, 5]"), problem.cases[1], problem)
    assert not passes(Outcome("done", b"1"), problem.cases[1], problem)


@needs_data
def test_a_sample_of_humaneval_passes_and_a_wrong_solution_never_does(pool: SandboxPool) -> None:
    problems = load_problems(DATA / "HumanEval.jsonl.gz", 15)["test"]
    assert len(problems) == 164
    for problem in problems[::12]:
        assert judge(problem.solution, problem, pool, wall_s=10.0).is_right, problem.entry
        wrong = f"def {problem.entry}(*arguments): return None"
        assert not judge(wrong, problem, pool, wall_s=10.0).is_right, problem.entry


@needs_data
def test_a_sample_of_mbpp_passes_and_a_wrong_solution_never_does(pool: SandboxPool) -> None:
    found = load_problems(DATA / "mbpp.jsonl", 15)
    assert [len(found[split]) for split in ("train", "validation", "test")] == [379, 90, 502]
    for problem in found["test"][::40]:
        assert judge(problem.solution, problem, pool, wall_s=10.0).is_right, problem.entry
        wrong = f"def {problem.entry}(*arguments): return 'something else'"
        assert not judge(wrong, problem, pool, wall_s=10.0).is_right, problem.entry


def test_a_hub_id_names_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, object]]:
        asked.append((name, config, split))
        return [PRIME_STDIN]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    load_problems("hub:someone/deep:taco", 15)
    found = load_problems("hub:someone/deep:lcbv5:test", 15)
    assert asked == [("someone/deep", "taco", "train"), ("someone/deep", "lcbv5", "test")]
    assert [len(found[split]) for split in ("train", "validation", "test")] == [0, 0, 1]


@pytest.mark.parametrize("split", ["test[:10]", "train+test", "test[50%:]"])
def test_a_part_of_a_test_split_is_never_trained_on(monkeypatch, split: str) -> None:
    rows = [{**PRIME_STDIN, "problem": f"Problem {number}."} for number in range(20)]
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **given: rows)
    )
    found = load_problems(f"hub:someone/parts:lcbv5:{split}", 15)
    assert [len(found[part]) for part in ("train", "validation", "test")] == [0, 0, 20]


def test_compressed_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(TACO).encode()))
    assert len(load_all(path)) == 1
