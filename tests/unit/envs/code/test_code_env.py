"""The environment `code`: rewards, turns, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moored.envs.code.env import Code
from moored.envs.code.sandbox import SandboxPool
from moored.envs.mix import make_env, open_env
from moored.errors import ConfigError, EnvError
from moored.reply import format_reply


@pytest.fixture
def env(pool: SandboxPool) -> Iterator[Code]:
    made = Code(max_turns=3)
    made.sandbox_pool = pool
    yield made
    made.close()


def answer_first(env: Code, num_right: int) -> str:
    """A reply that passes the first tests only."""
    problem = env._problem
    assert problem is not None and problem.kind == "stdin"
    known = {case.given: case.expected for case in problem.cases[:num_right]}
    program = f"import sys\nprint({known!r}.get(sys.stdin.read(), 'no idea'))"
    return format_reply("", program)


def stdin_seed(env: Code) -> int:
    """The first task that asks for a program."""
    for seed in range(100):
        env.reset(seed)
        assert env._problem is not None
        if env._problem.kind == "stdin":
            return seed
    raise AssertionError("no program in 100 tasks")


def test_the_reward_is_the_share_of_tests_passed(env: Code) -> None:
    env.reset(stdin_seed(env))
    result = env.step(answer_first(env, 7))
    assert (result.reward, result.success, result.terminated) == (0.7, False, False)
    assert result.metrics == {"tests_passed": 0.7, "not_python": 0.0, "timed_out": 0.0}
    assert str(result.observation).startswith("7 of 10 tests passed. Test 8 gave a wrong result.")


def test_a_later_turn_earns_what_it_adds_to_the_best(env: Code) -> None:
    env.reset(stdin_seed(env))
    rewards = [env.step(answer_first(env, num_right)).reward for num_right in (7, 3)]
    result = env.step(format_reply("", env.oracle()))
    assert rewards == [0.7, 0.0]
    assert result.reward == pytest.approx(0.3)
    assert result.success and result.terminated


def test_all_or_nothing_pays_for_all_tests_only(pool: SandboxPool) -> None:
    env = Code(reward="all", max_turns=2)
    env.sandbox_pool = pool
    env.reset(stdin_seed(env))
    assert env.step(answer_first(env, 9)).reward == 0.0
    assert env.step(format_reply("", f"```python\n{env.oracle()}\n```")).reward == 1.0


def test_an_answer_that_is_not_python_is_valid_and_earns_nothing(env: Code) -> None:
    env.reset(0)
    result = env.step(format_reply("", "print the sum"))
    assert (result.reward, result.is_valid, result.metrics["not_python"]) == (0.0, True, 1.0)


def test_the_last_turn_ends_the_episode(env: Code) -> None:
    env.reset(0)
    results = [env.step("no tags") for _ in range(3)]
    assert [result.terminated for result in results] == [False, False, True]
    assert [result.penalty for result in results] == [-0.1] * 3


def test_without_bubblewrap_no_episode_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refusal = "bwrap is not installed; apt-get install bubblewrap"
    with pytest.raises(EnvError, match=refusal), open_env("code"):
        pass
    with open_env("code", sandbox="none") as env:
        env.reset(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 4}, "code: level must be one number or a .* within 1 and 3, got 4"),
        ({"max_turns": 0}, "max_turns must lie within 1 and 1000, got 0"),
        ({"time_limit_s": 0}, "time_limit_s must lie within 0.1 and 30.0, got 0"),
        ({"memory_mb": 1}, "memory_mb must lie within 64"),
        ({"source": "no/such/file.jsonl"}, "no data file at 'no/such/file.jsonl'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env("code", **options)


def test_an_unknown_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of 'bubblewrap', 'docker', 'none'"):
        make_env("code", sandbox="chroot")
