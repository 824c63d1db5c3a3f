"""Dialogues of a file: what is read, what is refused, what is held out."""

from __future__ import annotations

import json

import pytest

from moored.errors import MooredError
from moored.sft.dialogues import hold_out, read_dialogues
from moored.sft.source import FileSource
from moored.types import Message

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]


def write(folder, *lines) -> str:
    file = folder / "dialogues.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts))
    return str(file)


def dialogue(text: str) -> tuple[Message, ...]:
    return Message("user", text), Message("assistant", "r")


def test_messages_and_pairs_of_prompt_and_completion_are_read(tmp_path):
    system = {"role": "system", "content": "s"}
    file = write(
        tmp_path, {"messages": [system, *PAIR, PAIR[0]]}, {"prompt": "p", "completion": "c"}
    )
    first, second = read_dialogues(file)
    # The question after the last reply is left out.
    assert [message.role for message in first] == ["system", "user", "assistant"]
    assert [message.text for message in second] == ["p", "c"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": 1} x', "JSON"),
        ("[" * 100_000, "JSON"),
        ([1], "object"),
        ("null", "object"),
        ({"messages": "abc"}, "messages"),
        ({"prompt": "q", "completion": PAIR[1:]}, "two texts or two lists"),
        ({"prompt": "q", "completion": None}, "completion"),
        ({"text": "a"}, "neither"),
        ({"messages": PAIR[:1]}, "no reply"),
        ({"messages": []}, "no reply"),
        ({"messages": PAIR[1:]}, "alternate"),
        ({"messages": [PAIR[0], *PAIR]}, "alternate"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"prompt": [{"role": "tool", "content": ""}], "completion": PAIR}, "0: role"),
        ({"prompt": "q", "completion": ""}, "without text"),
        ({"messages": [PAIR[0], {**PAIR[1], "content": " \n\t"}, *PAIR]}, "without text"),
        ({"prompt": "q\ud83d", "completion": "r"}, "JSON"),
    ],
)
def test_a_line_that_is_no_dialogue_is_named(tmp_path, line, why):
    with pytest.raises(MooredError) as caught:
        read_dialogues(write(tmp_path, {"messages": PAIR}, line))
    assert why in str(caught.value) and "dialogues.jsonl', line 2" in str(caught.value)


def test_prompt_and_completion_may_be_lists_of_messages(tmp_path):
    system = {"role": "system", "content": "s"}
    lines = [{"messages": [system, *PAIR]}, {"prompt": [system, PAIR[0]], "completion": PAIR[1:]}]
    first, second = read_dialogues(write(tmp_path, *lines))
    assert first == second and len(second) == 3
    # A column that a table has for other lines.
    file = write(tmp_path, {"messages": None, "prompt": "p", "completion": "c"})
    assert [message.text for message in read_dialogues(file)[0]] == ["p", "c"]


def test_a_question_without_text_may_have_a_reply(tmp_path):
    (found,) = read_dialogues(write(tmp_path, {"prompt": "", "completion": " r "}))
    assert [message.text for message in found] == ["", " r "]


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    line = '{"prompt": "Go.", "completion": "On."}'
    (tmp_path / "windows.jsonl").write_text(line, encoding="utf-8-sig")
    (tmp_path / "plain.jsonl").write_text(line, encoding="utf-8")
    assert read_dialogues(tmp_path / "windows.jsonl") == read_dialogues(tmp_path / "plain.jsonl")


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path):
    with pytest.raises(MooredError, match="the file is empty"):
        read_dialogues(write(tmp_path, ""))
    with pytest.raises(MooredError, match="No such file"):
        read_dialogues(tmp_path / "none.jsonl")


def test_a_tenth_at_most_is_held_out_and_its_copies_with_it():
    dialogues = [dialogue(str(k)) for k in range(40)]
    kept, tested = hold_out([*dialogues, *dialogues], 64)
    assert (len(kept), len(tested)) == (72, 4)
    assert not set(kept) & set(tested)
    assert hold_out(list(reversed(dialogues)), 64)[1] == tested
    assert len(hold_out(dialogues, 2)[1]) == 2
    assert hold_out(dialogues[:1], 64) == (dialogues[:1], [])
    assert len(hold_out(dialogues[:2], 64)[1]) == 1


def test_every_round_through_a_file_has_another_order_and_all_dialogues():
    dialogues = [dialogue(str(k)) for k in range(20)]
    source = FileSource(dialogues, num_held_out=0, seed=0)
    first, second = ([source.train(20 * k + i) for i in range(20)] for k in range(2))
    assert set(first) == set(second) == set(dialogues) and first != second
    again = FileSource(dialogues, num_held_out=0, seed=0)
    assert [again.train(index) for index in range(20, 40)] == second
    assert [FileSource(dialogues, num_held_out=0, seed=1).train(i) for i in range(20)] != first
