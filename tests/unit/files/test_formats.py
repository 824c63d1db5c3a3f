"""Every format gives the same records; every bad file a clear message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moored.errors import ConfigError, MooredError
from moored.files.columns import may_be_reward
from moored.files.formats import find_format, read_records, unclear_rewards
from moored.files.records import BadRow, ReadOptions, Record, parse_columns
from moored.files.tables import open_table
from moored.runlog.rollouts import write_groups
from moored.types import Group, Prompt, StopReason, Trajectory, Turn
from tests.warm import run_warm

OPTIONS = ReadOptions()
REPLY = "<think>go up</think><answer>up</answer>"


def lines(file, *rows, end="\n"):
    file.write_text("\n".join(json.dumps(row) for row in rows) + end)
    return file


def records(file, options=OPTIONS, reader=None) -> list[Record]:
    found = list(read_records(file, replace(options, reader=reader)))
    assert all(isinstance(row, Record) for row in found), found
    return found  # pyright: ignore[reportReturnType]


def parquet(file, columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), file)
    return file


def test_plain_lines_give_prompt_reasoning_step_group_and_reward(tmp_path):
    row = {"prompt": "x", "response": REPLY, "step": 3, "group": 7, "reward": 1}
    file = lines(tmp_path / "a.jsonl", row)
    assert find_format(open_table(file)) == "plain"
    (record,) = records(file)
    assert record.think is not None and REPLY[slice(*record.think)] == "go up"
    assert (record.prompt, record.step, record.group, record.reward) == ("x", 3, "7", 1.0)


def test_given_spans_beat_tags_and_count_tokens_of_ids(tmp_path):
    text = {"prompt": "x", "response": REPLY, "think_start": 0, "think_end": 4}
    ids = {"prompt": [1, 2], "response": [5, 6, 7], "think_start": 1, "think_end": 3}
    first, second = records(lines(tmp_path / "a.jsonl", text, ids))
    assert first.think == (0, 4)
    assert np.array_equal(second.response[slice(*second.think)], [6, 7])  # pyright: ignore


@pytest.mark.parametrize(
    ("response", "options", "reasoning"),
    [
        (REPLY, OPTIONS, "go up"),
        ("go up</think>up", OPTIONS, "go up"),  # the template wrote the opening tag
        ("<think>cut off", OPTIONS, None),
        ("no tags", OPTIONS, None),
        ("no tags", ReadOptions(whole=True), "no tags"),
        ("[r]go up[/r]", ReadOptions(tags=("[r]", "[/r]")), "go up"),
    ],
)
def test_reasoning_is_found_by_tags(tmp_path, response, options, reasoning):
    (record,) = records(lines(tmp_path / "a.jsonl", {"prompt": "x", "response": response}), options)
    assert (record.think and response[slice(*record.think)]) == reasoning


def test_verl_dumps_are_known_by_their_keys(tmp_path):
    row = {"input": "user\nx", "output": REPLY, "gts": "y", "score": 0.5, "step": 20, "acc": 1.0}
    file = lines(tmp_path / "20.jsonl", row)
    assert find_format(open_table(file)) == "verl"
    (record,) = records(file)
    assert (record.prompt, record.step, record.reward) == ("user\nx", 20, 0.5)
    assert records(file, ReadOptions(rewards={"acc": 1.0}))[0].reward == 1.0


def test_trl_completions_keep_chats_and_rewards_are_named_where_several_may_be(tmp_path):
    chat = [{"role": "user", "content": "x", "name": None}]
    written = [{"role": "assistant", "content": REPLY}]
    columns = {
        "step": [5, 5],
        "prompt": [chat, chat],
        "completion": [written, written],
        "accuracy": [1.0, float("nan")],
        "format": [0.5, 0.5],
        "note": ["a", "b"],
        "advantage": [9.0, 9.0],
    }
    file = parquet(tmp_path / "completions_00005.parquet", columns)
    assert find_format(open_table(file)) == "trl"
    first, second = records(file)
    assert first.prompt == [{"role": "user", "content": "x"}]
    assert first.step == 5 and not first.rewards
    assert unclear_rewards(file, OPTIONS) == ("accuracy", "format")
    both = ReadOptions(rewards={"accuracy": 1.0, "format": 1.0})
    assert [record.reward for record in records(file, both)] == [1.5, 0.5]
    assert first.response == second.response == REPLY
    assert records(file, ReadOptions(rewards={"format": 1.0}))[0].reward == 0.5
    with pytest.raises(MooredError, match="no column 'acc'"):
        records(file, ReadOptions(rewards={"acc": 1.0}))


def test_numbers_such_as_the_length_of_a_completion_are_never_rewards(tmp_path):
    row = {
        "step": 5,
        "prompt": "x",
        "completion": REPLY,
        "accuracy_reward": 1.0,
        "completion_length": 812,
        "numTokens": 33,
        "answer": 42,
        "advantage": 0.1,
    }
    file = lines(tmp_path / "a.jsonl", row)
    for only_rewards in (False, True):
        (record,) = records(file, ReadOptions(only_rewards=only_rewards))
        assert record.rewards == {"accuracy_reward": 1.0}
    assert may_be_reward("length_reward") and may_be_reward("correct") and may_be_reward("format")
    for name in ("completion_length", "logprob", "task_id", "elapsed_time", "seed"):
        assert not may_be_reward(name)


@pytest.mark.parametrize("only_rewards", [False, True])
def test_columns_of_any_name_can_be_named_for_replies_and_rewards_alike(tmp_path, only_rewards):
    row = {"question": "x", "output": REPLY, "it": 4, "task": "g", "game": "maze", "points": 2}
    file = lines(tmp_path / "a.jsonl", row)
    columns = parse_columns(["prompt=question,response=output", "step=it,env=game"], group="task")
    options = ReadOptions(columns=columns, rewards={"points": 1.0}, only_rewards=only_rewards)
    (record,) = records(file, options)
    assert (record.prompt, record.response, record.step) == ("x", REPLY, 4)
    assert (record.group, record.env, record.reward) == ("g", "maze", 2.0)


def test_columns_that_cannot_be_are_refused_with_the_remedy(tmp_path):
    for given, message in {
        "prompt": "takes WHAT=COLUMN",
        "promt=q": "did you mean 'prompt'",
        "reward=r": "named by --reward",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_columns([given])
    file = lines(tmp_path / "a.jsonl", {"question": "x", "response": REPLY})
    with pytest.raises(MooredError, match="no column 'qestion'; did you mean 'question'"):
        records(file, ReadOptions(columns={"prompt": "qestion"}))
    with pytest.raises(MooredError, match="--columns prompt=COLUMN,response=COLUMN"):
        records(file)


def chat(*texts: str) -> list[dict[str, str]]:
    """user, assistant, user, …"""
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]


def test_a_column_of_whole_dialogues_gives_prompt_and_reply_of_each_turn(tmp_path):
    whole, short = chat("a", REPLY, "b", "</think>later"), chat("c", REPLY)
    file = lines(tmp_path / "a.jsonl", {"messages": whole}, {"messages": short})
    first, other = records(file)
    assert (first.prompt, first.response) == (whole[:1], REPLY)
    assert other.prompt == short[:1] and other.later == ()
    assert [turn.prompt for turn in first.later] == [whole[:3]]
    assert [turn.think for turn in first.later] == [(0, 0)]
    (later,) = records(file, ReadOptions(turn=2))  # the other ended before
    assert (later.prompt, later.response) == (whole[:3], "</think>later")


def test_a_dialogue_in_a_completion_follows_its_prompt(tmp_path):
    prompt, *completion = chat("a", REPLY, "b", "</think>later")
    row = {"prompt": [prompt], "completion": completion}
    file = lines(tmp_path / "a.jsonl", row)
    (later,) = records(file, ReadOptions(turn=2))
    assert later.prompt == [prompt, *completion[:2]] and later.response == "</think>later"
    *_, bad = read_records(lines(tmp_path / "b.jsonl", {**row, "prompt": "a"}), ReadOptions(turn=2))
    assert isinstance(bad, BadRow) and "use --turn 1" in bad.why


def test_dialogues_are_grouped_by_what_stands_before_the_first_reply(tmp_path):
    rows = [{"messages": chat("a", reply), "reward": k} for k, reply in enumerate(("x", "y"))]
    found = records(lines(tmp_path / "a.jsonl", *rows), ReadOptions(only_rewards=True))
    assert [record.prompt for record in found] == [chat("a")] * 2
    assert [record.response for record in found] == [chat("a", reply)[1:] for reply in ("x", "y")]


def test_questions_of_a_real_data_set_are_read_by_named_columns():
    file = Path(__file__).parents[4] / "shared" / "data" / "gsm8k_test.jsonl"
    if not file.is_file():
        pytest.skip("the data set is not here")
    columns = {"prompt": "question", "response": "answer"}
    found = records(file, ReadOptions(columns=columns, whole=True))
    assert len(found) == 1319
    assert all(record.think == (0, len(record.response)) for record in found)


def own_rollouts(file: Path) -> Path:
    """One episode of two turns."""

    def turn(first: int) -> Turn:
        return Turn(
            prompt=Prompt(np.array([1, first])),
            completion_ids=np.array([9, first, 8]),
            logprobs=np.zeros(3, np.float32),
            think_span=(1, 2),
            answer_span=None,
            reply="r",
            seen="o",
            reward=0.5,
            is_valid=True,
            policy_version=0,
        )

    trajectory = Trajectory(
        env="e",
        task_seed=0,
        episode_seed=0,
        turns=(turn(3), turn(4)),
        stop=StopReason.DONE,
        success=True,
        metrics={},
    )
    group = Group(group_id=2, env="e", task_seed=0, trajectories=(trajectory,))
    write_groups(file, [group], step=4, kept=[True])
    return file


def test_own_rollouts_give_ids_and_spans_of_all_turns_or_of_one(tmp_path):
    pytest.importorskip("pyarrow")
    file = own_rollouts(tmp_path / "step_000004.parquet")
    assert find_format(open_table(file)) == "moored"
    (record,) = records(file)
    assert (record.step, record.group, record.reward, record.think) == (4, "2", 1.0, (1, 2))
    assert record.env == "e"
    with pytest.raises(ConfigError, match="leave 'prompt' out of --columns"):
        records(file, ReadOptions(columns={"prompt": "reply"}))
    assert np.array_equal(record.response, [9, 3, 8])
    (second,) = record.later
    (later,) = records(file, ReadOptions(turn=2))
    assert later.later == () and later.think == second.think == (1, 2)
    assert later.prompt.tolist() == second.prompt.tolist() == [1, 4]  # pyright: ignore


def test_own_rows_that_are_not_in_the_order_of_turns_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = own_rollouts(tmp_path / "step_000004.parquet")
    pq.write_table(pq.read_table(file).take([1, 0]), file)
    (bad,) = read_records(file, OPTIONS)
    assert isinstance(bad, BadRow) and "lacks turns" in bad.why
    assert len(records(file, ReadOptions(turn=1))) == 1


def test_a_torn_last_line_is_marked_and_a_broken_one_is_named(tmp_path):
    good = json.dumps({"prompt": "x", "response": "y"})
    file = tmp_path / "a.jsonl"
    file.write_text(f"{good}\n{good[:9]}\n{good}\n{good[:9]}")
    bad = [row for row in read_records(file, OPTIONS) if isinstance(row, BadRow)]
    assert [row.is_torn for row in bad] == [False, True]
    assert "line 2" in bad[0].where and "not JSON" in bad[0].why


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "x"}, "has no 'response'"),
        ({"prompt": 3, "response": "y"}, "not text, messages or token ids"),
        (
            {"prompt": "x", "response": "y", "step": "soon"},
            "'step' = 'soon', which is not",
        ),
        ({"prompt": "x", "response": "y", "step": 1.5}, "1.5, which is not a whole number"),
        ({"prompt": [1 << 63], "response": "y"}, "not text, messages or token ids"),
        ({"prompt": "x", "response": "y", "reward": "high"}, "not a number"),
        ({"prompt": "x", "response": "yy", "think_start": 1, "think_end": 9}, "0 to 2"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "response": "y"}, "images"),
        ({"prompt": "x", "response": [{"role": "user", "content": "y"}]}, "no assistant message"),
        (["prompt"], "not a JSON object"),
        ({"prompt": "", "response": "y"}, "has an empty 'prompt'"),
        ({"prompt": "x\ud83d", "response": "y"}, "'prompt' with half a character"),
        ({"prompt": "x", "response": "\ude00y"}, "'response' with half a character"),
        ({"prompt": "x", "response": [{"role": "assistant", "content": "\ud83d"}]}, "half a char"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(tmp_path, row, why):
    good = {"prompt": "x", "response": "y", "reward": 1}
    *_, bad = read_records(lines(tmp_path / "a.jsonl", good, row), OPTIONS)
    assert isinstance(bad, BadRow) and why in bad.why and "line 2" in bad.where


def test_a_column_of_steps_that_holds_none_is_no_step(tmp_path):
    row = {"prompt": "x", "response": REPLY, "reward": 1.0, "step": None}
    text = tmp_path / "b.csv"
    text.write_text("prompt,response,reward,step\n" + f"x,{REPLY},1.0,\n" * 2)
    files = [lines(tmp_path / "a.jsonl", row, row), text]
    files.append(parquet(tmp_path / "c.parquet", {name: [row[name]] * 2 for name in row}))
    for options in (OPTIONS, replace(OPTIONS, only_rewards=True)):
        for file in files:
            assert [record.step for record in records(file, options)] == [None, None]


@pytest.mark.parametrize("only_rewards", [False, True])
def test_a_row_without_a_step_is_named_where_others_have_one(tmp_path, only_rewards):
    without = {"prompt": "x", "response": "y", "reward": 1}
    file = lines(tmp_path / "a.jsonl", without, {**without, "step": 3})
    bad, good = read_records(file, ReadOptions(only_rewards=only_rewards))
    assert isinstance(bad, BadRow) and bad.why == "has no 'step'; every row needs it"
    assert isinstance(good, Record) and good.step == 3


def test_files_that_are_no_rollouts_are_refused(tmp_path):
    def refusal(file, reader=None) -> str:
        with pytest.raises(MooredError) as error:
            list(read_records(file, ReadOptions(reader=reader)))
        return str(error.value)

    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert "is empty" in refusal(empty)
    empty.write_bytes(b"\n\n")
    assert "is empty" in refusal(empty)
    assert "holds no rows" in refusal(parquet(tmp_path / "empty.parquet", {"prompt": []}))
    assert "cannot read" in refusal(tmp_path / "missing.jsonl")
    assert "question, answer, but needs" in refusal(
        lines(tmp_path / "b.jsonl", {"question": "x", "answer": "y"})
    )
    table = tmp_path / "a.csv"
    table.write_text("prompt,answer\nx,y\n")
    assert "prompt, answer, but needs" in refusal(table)
    good = lines(tmp_path / "c.jsonl", {"prompt": "x", "response": "y"})
    assert "needs prompt, and completion" in refusal(good, "trl")
    assert "no column 'schema'" in refusal(good, "moored")
    assert "did you mean 'plain'" in refusal(good, "plan")
    other = parquet(tmp_path / "d.parquet", {"a": [1]})
    assert "holds a, but needs prompt or input, and response" in refusal(other)
    torn = tmp_path / "e.parquet"
    torn.write_bytes(other.read_bytes()[:100])
    assert "is it whole?" in refusal(torn)


def test_a_first_line_that_is_broken_does_not_hide_the_format(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt":\n{"prompt": "x", "response": "y"}\n')
    bad, good = read_records(file, OPTIONS)
    assert isinstance(bad, BadRow) and not bad.is_torn and isinstance(good, Record)


def test_reading_drawing_and_showing_need_no_torch(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": "x", "response": REPLY})
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import moored.cli.main, moored.analysis.findings, moored.engine.endpoint.scorer
from pathlib import Path
from moored.files.formats import read_records
from moored.files.records import ReadOptions
from moored.analysis.diagnose import LookOptions, draw
rows = read_records(Path({str(file)!r}), ReadOptions())
print(draw(rows, LookOptions()).looks[0].num_rows)
"""
    done = run_warm([], code=code, slim=True)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("names", [("prompt", "response"), ("prompt", "completion")])
def test_plain_columns_are_read_from_every_kind_of_file(tmp_path, kind, names):
    prompt, response = names
    row = {prompt: "x", response: REPLY, "step": 3, "group_id": "g", "score": 0.5}
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        lines(file, row)
    elif kind == "csv":
        file.write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n")
    else:
        parquet(file, {name: [value] for name, value in row.items()})
    assert find_format(open_table(file)) == "plain"
    (record,) = records(file)
    assert (record.prompt, record.response, record.think) == ("x", REPLY, (7, 12))
    assert (record.step, record.group, record.reward) == (3, "g", 0.5)


def test_spans_of_a_csv_are_numbers_too(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,response,think_start,think_end\nx,go up,3,5\n")
    assert records(file)[0].think == (3, 5)


def test_rewards_are_weighted_and_groups_named_alike_for_replies_and_rewards(tmp_path):
    row = {"prompt": "x", "response": "y", "uid": 4, "acc": 1, "style": 0.5, "reward": 9}
    file = lines(tmp_path / "a.jsonl", row)
    options = ReadOptions(rewards={"acc": 2.0, "style": 1.0}, columns={"group": "uid"})
    for only_rewards in (False, True):
        (record,) = records(file, replace(options, only_rewards=only_rewards))
        assert (record.reward, record.group) == (2.5, "4")


def test_only_rewards_needs_no_reply_and_passes_images_by(tmp_path):
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    file = lines(tmp_path / "a.jsonl", {"prompt": picture, "reward": 1, "success": True})
    (record,) = records(file, ReadOptions(only_rewards=True))
    assert (record.prompt, record.response, record.success) == (picture, None, 1.0)


def test_a_format_of_ones_own_is_named_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "my_format.py").write_text(
        "from moored.files.formats import ColumnFormat\n"
        "MINE = ColumnFormat(prompt=('q',), response=('a',), group=(), reward=('points',))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = lines(tmp_path / "a.jsonl", {"q": "x", "a": REPLY, "points": 3})
    (record,) = records(file, reader="my_format:MINE")
    assert (record.prompt, record.reward) == ("x", 3.0)
