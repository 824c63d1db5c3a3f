import math
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.envs.arithmetic import evaluate
from moored.envs.base import SPLIT_SEEDS
from moored.envs.countdown import Countdown, score
from moored.errors import EnvError
from moored.reply import format_reply


def value_of(text):
    result = evaluate(text)
    assert result is not None
    return result.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("20-8-5", 7),
        ("20-(8-5)", 17),
        ("48/4/3", 4),
        ("48/(4/3)", 36),
        ("1/3+1/6", Fraction(1, 2)),
        ("8/(3-8/3)", 24),
        ("3 × 4 − 10 ÷ 5", 10),
        ("((((5))))", 5),
        ("1.5*4", 6),
        ("2*(3+4)*(5-1)", 56),
        ("3-5", -2),
    ],
)
def test_arithmetic_is_exact_and_respects_precedence(text, value):
    assert value_of(text) == value


def test_numbers_are_reported_in_the_order_they_are_written():
    result = evaluate("(25 - 3) * 7")
    assert result is not None
    assert result.numbers == (25, 3, 7)


@pytest.mark.parametrize("text", ["1/0", "5/(3-3)", "0/0", "1/(2-4/2)+7"])
def test_division_by_zero_has_no_value(text):
    assert value_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "()", "(", ")", "1)", "(1", "1)+(2", ")1(", "1 2", "1(2)", "(1)(2)", "(1)2"),
        *("-1", "+1", "3--2", "3*-2", "1+", "*1", "1++2", "9**9**9", "2^3", "7//2", "7%2", "1e3"),
        *("1,000", "0x10", "1_0", "1.", ".5", "1.2.3", "a", "1+a", "√4", "3!", "²", "2²", "٣+1"),
        *("１+２", "1;2", "__import__('os')", "1+1=2", "4 × 5 ✕ 2", "1\x00+2", "1 || 2"),
    ],
)
def test_what_is_no_expression_is_refused(text):
    assert evaluate(text) is None


def test_deep_nesting_neither_recurses_nor_hangs():
    assert value_of("(" * 255 + "1" + ")" * 255) == 1
    assert evaluate("(" * 100_000 + "1" + ")" * 100_000) is None
    assert evaluate("(" * 511) is None


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda part: st.builds(
        str.format, st.sampled_from(["{}{}{}", "({} {} {})"]), part, st.sampled_from("+-*/"), part
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_the_parser_agrees_with_python(text):
    result = evaluate(text)
    assert result is not None
    exact = re.sub(r"[0-9]+", r"Fraction(\g<0>)", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert result.value == expected


# 25 + 7 * 3 = 46: the numbers 3, 7, 25 and the target 46.
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("25 + 7 * 3", 1.0),
        ("7×3+25", 1.0),
        ("(3*7)+25 = 46", 1.0),
        ("25 + 7 * 3 = 45", 1.0),
        ("25 + 7 + 3", 0.1),
        ("25 + 7 + 3 = 46", 0.1),
        ("25 - 7 / 3", 0.1),
        ("25 + 21", 0.0),
        ("46", 0.0),
        ("25 + 7 * 3 + 3 - 3", 0.0),
        ("7 * 3", 0.0),
        ("25 + 7 * 3 = 46 = 46", 0.0),
        ("25 + 7 * 3 = forty-six", 0.0),
        ("= 46", 0.0),
        ("25 / (7 - 7) + 3", 0.0),
        ("-(3 - 7) + 25", 0.0),
        ("2 5 + 7 * 3", 0.0),
        ("25 + 7 * 3 || 25 + 7 * 3", 0.0),
        ("", 0.0),
        ("(" * 100_000, 0.0),
        ("1" * 10**6, 0.0),
    ],
)
def test_score_follows_the_rules(answer, reward):
    assert score(answer, (3, 7, 25), 46) == reward


def test_division_by_zero_earns_nothing_even_with_the_right_numbers():
    assert score("5 / (3 - 3)", (3, 3, 5), 5) == 0.0


def test_repeated_numbers_must_be_used_as_often_as_given():
    assert score("3 + 3 + 5", (3, 3, 5), 11) == 1.0
    assert score("3 + 5", (3, 3, 5), 8) == 0.0
    assert score("3 + 3 + 3 + 5", (3, 3, 5), 14) == 0.0


@pytest.mark.parametrize("split", SPLIT_SEEDS)
def test_the_reference_expression_solves_every_task(split):
    env = Countdown()
    for offset in range(150):
        env.reset(SPLIT_SEEDS[split].start + offset)
        result = env.step(format_reply("", env.oracle()))
        assert (result.reward, result.success, result.terminated) == (1.0, True, True)


@pytest.mark.parametrize("options", [{}, {"num_numbers": 6}, {"max_number": 9, "max_target": 24}])
def test_tasks_keep_to_the_options(options):
    env = Countdown(**options)
    counts = set()
    for seed in range(200):
        _, user = env.reset(seed)
        numbers, target = str(user.content).splitlines()[0].removesuffix(".").split(". Target: ")
        drawn = [int(n) for n in numbers.removeprefix("Numbers: ").split(", ")]
        counts.add(len(drawn))
        assert all(1 <= n <= env.max_number for n in drawn)
        assert 1 <= int(target) <= env.max_target
    assert counts == set(range(env.num_numbers[0], env.num_numbers[1] + 1))


def test_all_four_operators_occur_in_solutions():
    env = Countdown()
    solutions = []
    for seed in range(100):
        env.reset(seed)
        solutions.append(env.oracle())
    for sign in "+-*/":
        assert sum(sign in solution for solution in solutions) >= 5


def test_the_prompt_states_the_penalty_that_is_charged():
    env = Countdown(format_penalty=-0.25)
    system, _ = env.reset(0)
    assert "-0.25 for a malformed reply" in str(system.content)
    result = env.step("no tags")
    assert (result.reward, result.is_valid, result.terminated) == (-0.25, False, True)


def test_a_well_formed_but_wrong_answer_is_valid():
    env = Countdown()
    env.reset(0)
    result = env.step(format_reply("hm", "I do not know"))
    assert (result.reward, result.is_valid, result.success) == (0.0, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_numbers": 1}, "num_numbers"),
        ({"num_numbers": (4, 3)}, "num_numbers"),
        ({"num_numbers": (3, 4, 5)}, "num_numbers"),
        ({"num_numbers": 7}, "num_numbers"),
        ({"max_number": 0}, "max_number"),
        ({"num_numbers": (3.0, 4.5)}, "num_numbers"),
        ({"max_target": 0}, "max_target"),
        ({"max_target": "99"}, "max_target"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(EnvError, match=message):
        Countdown(**options)


def test_a_target_out_of_reach_is_an_error_not_a_hang():
    # 1 and 1 make 2, the sum, or 1, the product: no target is left.
    env = Countdown(num_numbers=2, max_number=1, max_target=99)
    with pytest.raises(EnvError, match="other than the sum and the product"):
        env.reset(0)


@pytest.mark.parametrize("options", [{}, {"num_numbers": 2}, {"max_number": 9, "max_target": 24}])
def test_neither_adding_nor_multiplying_all_numbers_solves_a_task(options):
    env = Countdown(**options)
    for split in SPLIT_SEEDS.values():
        for seed in split[:300]:
            env.reset(seed)
            assert env._task is not None
            assert env._task.target not in (sum(env._task.numbers), math.prod(env._task.numbers))


NASTY = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="()+-*/0123456789= ", max_size=600),
    st.sampled_from(["9**9**9", "(" * 200_000, "9" * 10**6, "1||2", "٣+²", "\ud800", "1/0" * 100]),
)
