import importlib.util
import json
import logging
import pickle
import random
import re
import sys
import threading
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moored.envs.base import SPLIT_SEEDS
from moored.envs.dataset_rows import Row, load_rows
from moored.envs.math import verifier as math_verifier
from moored.envs.math.answer import same_answer
from moored.envs.math.metamath import MetaMath
from moored.envs.worker import WorkerLost
from moored.errors import EnvError
from moored.reply import format_reply

WRONG = format_reply("", "-12345")


def reply(env):
    return format_reply("", env.oracle())


# Answers.


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        *(("1,234", "1234"), ("1,000,000 people", "1000000"), ("10\\,000", "10000")),
        *(("1{,}000", "1000"), ("$5.00", "5"), ("\\$18", "18"), ("18 dollars", "$18")),
        *(("-$5", "-5"), ("£1,000.50", "1000.5"), ("50%", "50"), ("50\\%", "50 percent")),
        *(("0.5", "1/2"), (".5", "1/2"), ("2.50", "2.5"), ("007", "7"), ("+7", "7")),
        *(("\\frac{1}{2}", "0.5"), ("\\dfrac12", "1/2"), ("-\\frac{1}{2}", "\\frac{-1}{2}")),
        *(("1 1/2", "1.5"), ("12\\frac{3}{4}", "12.75"), ("2/4", "1/2"), ("−3", "-3")),
        *(("\\boxed{\\frac{3}{4}}", "0.75"), ("So it is \\boxed{42} cm.", "42")),
        *(("$12$", "12"), ("\\(12\\)", "12"), ("**42**", "42"), ("`42`", "42")),
        *(("The answer is: 7.", "7"), ("Answer: 7", "7"), ("#### 72", "72"), ("x = 5", "5")),
        *(("12 apples", "12"), ("60 km/h", "60"), ("3.5 cm^2", "3.5"), ("5 cm²", "5")),
        *(("5 m", "5"), ("5kg", "5"), ("5 square feet", "5"), ("3\\text{ hours}", "3")),
        *(("90^\\circ", "90"), ("90°", "90 degrees"), ("3 pieces of cake.", "3")),
        *(("Monday", "monday."), ("\\text{Monday}", "monday"), ("(1, 2)", "(1,2)")),
        *(("\\left(1,2\\right)", "(1,2)"), ("2\\pi", "2 \\pi"), ("x^2 + 1", "x^2+1")),
        *(("5€", "5"), ("1,000 €", "€1000"), ("5£", "5 pounds"), ("5¥ each", "5")),
        *(("75¢", "75 cents"), ("5 ₹", "5"), ("₹5", "5"), ("20 first graders", "20")),
        *(("12\u00a0apples", "12"), ("3 quarters", "3"), ("40 seconds", "40")),
    ],
)
def test_answers_that_mean_the_same_are_equal(given_answer, expected):
    assert same_answer(given_answer, expected)
    assert same_answer(expected, given_answer)


@pytest.mark.parametrize(
    ("given_answer", "expected"),
    [
        *(("5", "6"), ("-5", "5"), ("50%", "0.5"), ("0.333", "1/3"), ("1/0", "1"), ("1/0", "0")),
        *(("5x", "5"), ("5m", "5"), ("2pi", "2"), ("2 pi", "2"), ("5 million", "5")),
        *(("2 sqrt(3)", "2"), ("3\\sqrt{2}", "3"), ("5!", "5"), ("5^2", "5"), ("3²", "32")),
        *(("5 or 6", "5"), ("5, 6", "5"), ("1,2", "12"), ("1 2", "12"), ("3 out of 4", "3")),
        *(("12:30", "12"), ("--5", "5"), ("3+4", "7"), ("five", "5"), ("1.2.3", "1.2")),
        *(("1,0000", "10000"), ("1e3", "1000"), ("9**9**9", "9"), ("0x5", "5"), ("1_0", "10")),
        *(("٣", "3"), ("５", "5"), ("²", "2"), ("½", "2"), ("𝟓", "5"), ("①", "1")),
        *(("", ""), ("", "5"), ("$", "$"), ("\\boxed{}", "5"), ("nan", "5"), ("inf", "5")),
        *(("5 dozen", "5"), ("2 dozens", "2"), ("3 hundredths", "3"), ("3 tenths", "3")),
        *(("2 halves", "2"), ("2 thirds", "2"), ("5 thousands", "5"), ("7 millionths", "7")),
        *(("3 fourths", "3"), ("1 fourth", "1"), ("3-fourths", "3"), ("1 three-fourth", "1")),
        ("1" * 2000, "1" * 2000),
        ("0." + "0" * 10**6 + "1", "0"),
    ],
)
def test_answers_that_differ_are_not_equal(given_answer, expected):
    assert not same_answer(given_answer, expected)
    assert not same_answer(expected, given_answer)


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=1000), st.sampled_from(["{0}/{1}", "\\frac{{{0}}}{{{1}}}"]))
def test_every_fraction_is_read_back(fraction, form):
    text = form.format(fraction.numerator, fraction.denominator)
    assert same_answer(text, str(fraction))
    assert not same_answer(text, str(fraction + 1))


# The environment.


def test_every_turn_used_up_halves_the_reward():
    env = MetaMath(max_turns=5)
    for num_wrong, reward in enumerate([1.0, 0.5, 0.25, 0.125, 0.0625]):
        env.reset(3)
        for _ in range(num_wrong):
            result = env.step(WRONG)
            assert (result.reward, result.is_over, result.is_valid) == (0.0, False, True)
        result = env.step(reply(env))
        assert (result.reward, result.is_over, result.success) == (reward, True, True)


def test_a_malformed_reply_costs_the_penalty_and_the_turn():
    env = MetaMath(max_turns=3)
    env.reset(3)
    result = env.step("seven")
    assert (result.reward, result.is_valid, result.is_over) == (-0.1, False, False)
    assert "Turn 2 of 3" in str(result.observation)
    assert env.step(reply(env)).reward == 0.5


def test_the_last_try_terminates_the_episode():
    env = MetaMath(max_turns=2)
    env.reset(3)
    assert not env.step(WRONG).is_over
    result = env.step(WRONG)
    assert (result.terminated, result.success, result.reward) == (True, False, 0.0)
    with pytest.raises(EnvError, match="call reset"):
        env.step(WRONG)


def test_a_wrong_answer_is_told_without_giving_the_right_one_away():
    env = MetaMath()
    env.reset(11)
    answer = env.oracle()
    observation = str(env.step(WRONG).observation)
    assert observation.startswith("Wrong answer. Reward: 0.\nTurn 2 of 5.")
    assert answer not in observation.replace("Turn 2 of 5.", "").replace("Reward: 0.", "")


def test_the_prompt_states_the_real_limits():
    env = MetaMath(max_turns=7, format_penalty=-0.3)
    system, user = env.reset(0)
    assert "at most 7 turns" in str(system.content)
    assert "earns -0.3" in str(system.content)
    assert str(user.content).startswith("Turn 1 of 7.")
    assert "one turn" in str(MetaMath(max_turns=1).reset(0)[0].content)


@pytest.mark.parametrize("split", SPLIT_SEEDS)
def test_the_reference_answer_solves_every_problem(split):
    env = MetaMath()
    for offset in range(60):
        env.reset(SPLIT_SEEDS[split].start + offset)
        assert env.step(reply(env)).success


def spoilt(tmp_path, answer):
    """What noised episodes answer on the first turn to a row with this answer."""
    rows = [{"query": f"How much is {n}?", "response": f"The answer is: {answer}"} for n in "ab"]
    env = MetaMath(source=write(tmp_path, json.dumps(rows)))
    env.reset(0)
    assert env.oracle() == answer
    return {env.spoil(answer, 0.0, random.Random(seed)) for seed in range(100)}


@pytest.mark.parametrize(
    "answer",
    [
        *("2.1", "12 m^2", "12\\text{ cm}^2", "5 cm2", "0/5", "\\frac{0}{5}", "0", "99", "1/2"),
        *("Monday", "\\pi", "x", "x^2", "\\boxed{7} or 8"),
    ],
)
def test_a_spoilt_answer_is_wrong(tmp_path, answer):
    wrong = spoilt(tmp_path, answer)
    assert len(wrong) > 1
    assert not [text for text in wrong if same_answer(text, answer)]


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        *(("$1,008", r"\$1,00[1-9]"), ("1,999", r"1,99[1-8]"), ("2.95", r"2\.(9[6-9]|10[0-4])")),
        *(("12 m^2", r"1[1-9] m\^2"), ("5 cm2", r"[1-9] cm2"), ("3 s^{-2}", r"[1-9] s\^\{-2\}")),
        *(("7 m^{10}", r"[1-9] m\^\{10\}"), ("x^2", r"x\^[1-9]"), ("\\frac12", r"\\frac1[1-9]")),
        *(("3/10", r"3/1[1-9]"), ("0/5", r"[1-9]/5"), ("Monday", r"[0-9]+"), ("\\pi", r"[0-9]+")),
    ],
)
def test_a_spoilt_answer_keeps_its_form_and_one_in_words_becomes_a_number(tmp_path, answer, form):
    for wrong in spoilt(tmp_path, answer):
        assert re.fullmatch(form, wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 0}, "level"),
        ({"level": (2, 1)}, "level"),
        ({"level": 4}, "level"),
        ({"max_turns": 0}, "max_turns"),
        ({"source": "no/such/file.json"}, "no data file"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(EnvError, match=message):
        MetaMath(**options)


# Rows.


def metamath_rows(number):
    return [
        {
            "type": "GSM_Rephrased",
            "query": f"What is {n} plus {n}, said in another way?",
            "original_question": f"What is {n // 2} plus?",
            "response": f"We add them.\n#### {2 * n}\nThe answer is: {2 * n}",
        }
        for n in range(number)
    ]


def write(tmp_path, text, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_parquet(tmp_path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_the_same_rows_come_from_json_jsonl_and_parquet(tmp_path):
    rows = metamath_rows(5)
    jsonl = "\n".join(json.dumps(row) for row in rows)
    expected = load_rows(write(tmp_path, jsonl))
    question = "What is 3 plus 3, said in another way?"
    assert expected[3] == Row(question, "6", "What is 1 plus?", "We add them.")
    assert load_rows(write(tmp_path, json.dumps(rows, indent=1), "rows.json")) == expected
    assert load_rows(write(tmp_path, b"\xef\xbb\xbf" + jsonl.encode() + b"\r\n\n", "x")) == expected
    assert load_rows(write_parquet(tmp_path, rows)) == expected


def test_gsm8k_rows_are_read(tmp_path):
    row = {"question": "How many?", "answer": "He has 5*2=<<5*2=10>>10.\n#### 1,010"}
    (loaded,) = load_rows(write(tmp_path, json.dumps(row)))
    assert loaded == Row("How many?", "1,010", "How many?", "He has 5*2=10.")


def test_latex_answers_are_kept_and_solved(tmp_path):
    rows = [
        {"query": f"Half of {n}?", "response": f"So.\nThe answer is: $\\frac{{{n}}}{{2}}$"}
        for n in range(1, 40)
    ]
    env = MetaMath(source=write(tmp_path, json.dumps(rows)))
    env.reset(0)
    assert env.oracle().startswith("$\\frac{")
    assert env.step(reply(env)).success


def test_rewordings_of_one_question_stay_in_one_split(tmp_path):
    path = write(tmp_path, json.dumps(metamath_rows(400)))
    env = MetaMath(source=path)
    originals = {}
    for split, seeds in SPLIT_SEEDS.items():
        originals[split] = set()
        for offset in range(60):
            question = str(env.reset(seeds.start + offset)[1].content).splitlines()[1]
            originals[split].add(int(question.split()[2]) // 2)
    train, validation, test = originals.values()
    assert not (train & validation or train & test or validation & test)


def test_too_few_rows_for_a_split_are_told_at_construction(tmp_path, caplog):
    # By the hash of their questions: 1 row can fill one split only, 400 rows fill all.
    MetaMath(source=write(tmp_path, json.dumps(metamath_rows(400))))
    assert caplog.text == ""
    MetaMath(source=write(tmp_path, json.dumps(metamath_rows(1)), "few.json"))
    assert "few.json: none of its 1 rows belongs to the validation or test split" in caplog.text


def test_a_pickled_environment_leaves_its_rows_behind(tmp_path):
    env = MetaMath(source=write(tmp_path, json.dumps(metamath_rows(2000))))
    first = env.reset(1)
    data = pickle.dumps(env)
    assert len(data) < 2000
    assert pickle.loads(data).reset(1) == first


def test_rows_without_a_final_answer_are_left_out_and_told(tmp_path, caplog):
    rows = [*metamath_rows(2), {"query": "Why?", "response": "Nobody knows."}]
    with caplog.at_level(logging.WARNING):
        assert len(load_rows(write(tmp_path, json.dumps(rows)))) == 2
    assert "left out 1 of 3 rows" in caplog.text
    assert "row 3" in caplog.text


GOOD = json.dumps(metamath_rows(1)[0])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        ("[]", ["no rows"]),
        ("hello", ["holds no JSON"]),
        (f"{GOOD}\n{GOOD[:40]}", ["line 2", "not JSON", "remove"]),
        ('{"query": "a", "text": "b"}', ["line 1", "query, text", "rename"]),
        ("{}", ["no rows"]),
        ('{"query": 3, "response": "The answer is: 3"}', ["line 1", "query must be text", "int"]),
        ('{"query": "a", "response": null}', ["line 1", "response", "NoneType"]),
        ('{"query": "a", "response": "b"}', ["no final answer in any row", "The answer is"]),
    ],
)
def test_broken_files_are_explained(tmp_path, text, parts):
    path = write(tmp_path, text)
    with pytest.raises(EnvError) as error:
        load_rows(path)
    for part in [*parts, "rows.jsonl"]:
        assert part in str(error.value)


def test_parquet_without_the_columns_names_those_it_has(tmp_path):
    with pytest.raises(EnvError, match=r"row 1 of .* has the columns a, b; rename"):
        load_rows(write_parquet(tmp_path, [{"a": 1, "b": 2}]))


def test_a_changed_file_is_read_again(tmp_path):
    assert len(load_rows(write(tmp_path, json.dumps(metamath_rows(2))))) == 2
    assert len(load_rows(write(tmp_path, json.dumps(metamath_rows(30))))) == 30


def fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_a_hub_id_is_loaded_from_its_train_split(monkeypatch):
    calls = []

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        return metamath_rows(50)

    fake_hub(monkeypatch, load_dataset)
    env = MetaMath(source="hub:someone/first")
    env.reset(0)
    assert env.step(reply(env)).success
    load_rows("hub:someone/second:main")
    assert calls == [("someone/first", None, "train"), ("someone/second", "main", "train")]


def test_hub_errors_say_what_to_do(monkeypatch):
    def load_dataset(name, config, *, split):
        raise ConnectionError("offline")

    fake_hub(monkeypatch, load_dataset)
    with pytest.raises(EnvError, match=r"someone/third.*ConnectionError: offline.*give its path"):
        load_rows("hub:someone/third")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvError, match="pip install datasets"):
        load_rows("hub:someone/fourth")


# math-verify.


def test_a_missing_math_verify_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"pip install 'moored\[math\]'"):
        MetaMath(math_verify=True)


def algebra(tmp_path):
    rows = [{"query": f"Expand {n}?", "response": "The answer is: (x+1)^2"} for n in range(40)]
    return write(tmp_path, json.dumps(rows))


def test_math_verify_accepts_equivalent_algebra_in_a_thread(tmp_path):
    pytest.importorskip("math_verify")
    path, rewards = algebra(tmp_path), []

    def play(math_verify):
        env = MetaMath(source=path, math_verify=math_verify)
        env.reset(0)
        rewards.append(env.step(format_reply("", "x^2 + 2x + 1")).reward)

    for math_verify in (False, True):
        thread = threading.Thread(target=play, args=(math_verify,))
        thread.start()
        thread.join()
    assert rewards == [0.0, 1.0]


def test_math_verify_is_stopped_and_goes_on_without_a_restart(monkeypatch):
    pytest.importorskip("math_verify")
    math_verifier.is_equivalent("x+1", "2")
    child = math_verifier._VERIFIER._process
    # Too much work to expand, and the text does not show it: seconds of computing, cut at 0.3.
    with pytest.raises(WorkerLost) as lost:
        math_verifier._VERIFIER.ask("(a+b+c+d)^{40}", "5", cpu_s=0.3)
    assert lost.value.is_late
    monkeypatch.setattr(math_verifier, "LIMIT_S", 0.3)
    assert not math_verifier.is_equivalent("(a+b+c+d)^{40}", "5")
    monkeypatch.setattr(math_verifier, "LIMIT_S", 20.0)
    assert math_verifier.is_equivalent("\\sqrt{8}", "2\\sqrt{2}")
    assert not math_verifier.is_equivalent("\\sqrt{8}", "2\\sqrt{3}")
    assert math_verifier._VERIFIER._process is child


def test_math_verify_starts_again_when_its_process_was_lost():
    pytest.importorskip("math_verify")
    math_verifier.is_equivalent("x+1", "3")
    lost = math_verifier._VERIFIER._process
    assert lost is not None
    lost.kill()
    lost.wait()
    assert math_verifier.is_equivalent("\\sqrt{18}", "3\\sqrt{2}")
    assert math_verifier._VERIFIER._process is not lost


def test_verdicts_are_remembered(monkeypatch):
    pytest.importorskip("math_verify")
    assert math_verifier.is_equivalent("\\sqrt{50}", "5\\sqrt{2}")
    monkeypatch.setattr(math_verifier, "_VERIFIER", None)
    assert math_verifier.is_equivalent("\\sqrt{50}", "5\\sqrt{2}")


def test_math_verify_is_not_asked_about_plain_wrong_numbers(monkeypatch):
    monkeypatch.setattr(math_verifier, "_VERIFIER", None)
    assert not math_verifier.is_equivalent("1,201", "1200")
    assert math_verifier.is_equivalent("1,200", "1200")


def test_math_verify_is_not_asked_about_endless_answers(monkeypatch):
    monkeypatch.setattr(math_verifier, "_VERIFIER", None)
    for answer in ("x" * 10**6, "(" * 999, "I do not know"):
        assert not math_verifier.is_equivalent(answer, "5")
