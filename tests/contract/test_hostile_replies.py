"""Every environment scores whatever is replied, on any turn, in time; nothing is executed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.envs import time_fuzzed_replies
from moored.envs import format_reply
from moored.envs.check.nasty import EXECUTED
from moored.envs.check.probe import Probe
from moored.envs.describe import playable_names
from moored.envs.mix import make_env, open_env
from tests.contract.registered import every_environment, needs_bubblewrap
from tests.warm import run_script

ROOT = Path(__file__).parents[2]
REPLY_LIMIT_S = 0.05
SYMBOLIC_LIMIT_S = 1.5
"""math-verify has 1 s of computing for an answer; the other half is for a busy machine."""
PROGRAM_LIMIT_S = 0.2


@pytest.mark.parametrize("name", [name for name in playable_names() if name != "code"])
def test_ten_thousand_hostile_replies_are_scored_in_50_ms_each(name: str) -> None:
    with open_env(name) as env:
        assert time_fuzzed_replies(Probe(env), 10_000, REPLY_LIMIT_S) <= REPLY_LIMIT_S


@needs_bubblewrap
def test_two_thousand_hostile_programs_are_judged_within_their_time_limit() -> None:
    """About half of them are well-formed, mostly right programs with a few characters changed.

    Only those run, each in a process of its own. How replies are read before that is the
    same for all environments, and met by ten thousand in the test above; each reply of
    `NASTY_REPLIES` is met where the rules are checked.
    """
    limit_s = PROGRAM_LIMIT_S + 0.5
    with open_env("code", time_limit_s=PROGRAM_LIMIT_S, max_turns=8) as env:
        assert time_fuzzed_replies(Probe(env), 2_000, limit_s) <= limit_s


def test_hostile_replies_are_scored_with_symbolic_answers() -> None:
    env = Probe(make_env("metamath", math_verify=True))
    assert time_fuzzed_replies(env, 500, SYMBOLIC_LIMIT_S) <= SYMBOLIC_LIMIT_S


replies = st.one_of(
    st.text(max_size=200),
    st.text(max_size=100).map(lambda answer: format_reply("", answer)),
    st.text(alphabet="0123456789+-*/()=|. rcUDLRupdownleftight'", max_size=60).map(
        lambda answer: format_reply("", answer)
    ),
)


@every_environment
def test_any_text_is_scored(name: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 999), st.lists(replies, min_size=1, max_size=5))
    def feed(seed: int, texts: list[str]) -> None:
        env.reset(seed)
        for text in texts:
            result = env.step(text)
            assert math.isfinite(result.reward)
            if result.is_over:
                break
        assert EXECUTED == []

    with open_env(name) as opened:
        env = Probe(opened)
        feed()


@pytest.mark.parametrize("count", ["0", "-5", "many"])
def test_the_benchmark_refuses_to_fuzz_with_no_replies(count: str) -> None:
    result = run_script(ROOT / "benchmarks" / "envs.py", f"--fuzz={count}", slim=True)
    assert result.returncode == 2
    assert f"must be a whole number, at least 1, got '{count}'" in result.stderr
