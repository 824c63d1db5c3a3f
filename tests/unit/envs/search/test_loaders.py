"""Passages and questions from files, made up and real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moored.envs.search.corpus import Passage, load_corpus, parse_contents
from moored.envs.search.questions import load_questions
from moored.errors import EnvError

DATA = Path(__file__).parents[4].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real rows are not here")


def write(tmp_path: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_passages_have_title_and_text_or_contents(tmp_path):
    path = write(
        tmp_path,
        {"title": "A", "text": " one ", "id": 7},
        {"id": "0", "contents": '"B C"\nfirst\nsecond'},
    )
    assert load_corpus(path) == (Passage("A", "one"), Passage("B C", "first\nsecond"))


def test_contents_are_read_back():
    passage = Passage('The "Amber" Door', "Text.")
    assert parse_contents(passage.contents) == passage


def test_a_changed_corpus_is_read_again(tmp_path):
    load_corpus(write(tmp_path, {"title": "A", "text": "one"}))
    assert load_corpus(write(tmp_path, {"title": "A", "text": "other"}))[0].text == "other"


def test_a_lone_surrogate_is_replaced(tmp_path):
    assert load_corpus(write(tmp_path, {"title": "A\ud800", "text": ""}))[0].title == "A?"


@pytest.mark.parametrize(
    ("row", "answers", "titles"),
    [
        ({"question": "q", "answer": "a", "type": "bridge"}, ("a",), ()),
        (
            {"question": "q", "answer": "a", "supporting_facts": [["T", 0], ["T", 2], ["U", 1]]},
            ("a",),
            ("T", "U"),
        ),
        (
            {"question": "q", "answer": "a", "supporting_facts": {"title": ["T"], "sent_id": [0]}},
            ("a",),
            ("T",),
        ),
        ({"question": "q", "answer": ["a", "b"]}, ("a", "b"), ()),
        ({"question": "q", "golden_answers": ["a", " "], "data_source": "nq"}, ("a",), ()),
    ],
    ids=["hotpotqa", "2wiki", "table", "nq_open", "search_r1"],
)
def test_question_rows_of_each_data_set_are_read(tmp_path, row, answers, titles):
    (question,) = load_questions(write(tmp_path, row))
    assert (question.text, question.answers, question.titles) == ("q", answers, titles)


def test_rows_without_an_answer_are_left_out_and_told(tmp_path, caplog):
    path = write(tmp_path, {"question": "q", "answer": "a"}, {"question": "r", "answer": " "})
    assert len(load_questions(path)) == 1
    assert "left out 1 of 2 rows" in caplog.text and "line 2" in caplog.text


@pytest.mark.parametrize(
    ("load", "row", "message"),
    [
        (load_corpus, {"name": "A"}, r"line 1 of .* has the columns name; a passage needs title"),
        (load_corpus, {"title": "A", "text": 3}, "a passage needs title and text"),
        (load_questions, {"query": "q"}, "a question needs question, and answer"),
        (load_questions, {"question": "q", "answer": 3}, "answer must be text or a list of texts"),
        (load_questions, {"question": "q", "answer": ""}, "holds no question with an answer"),
        (
            load_questions,
            {"question": "q", "answer": "a", "supporting_facts": [[3, 0]]},
            "must name titles as text",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_explained(tmp_path, load, row, message):
    with pytest.raises(EnvError, match=message):
        load(write(tmp_path, row))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(EnvError, match=r"no data file at .*gone\.jsonl"):
        load_corpus(tmp_path / "gone.jsonl")


@needs_data
def test_the_real_hotpotqa_rows_are_read():
    questions = load_questions(DATA / "hotpotqa_dev.json")
    assert len(questions) == 7405
    assert questions[1].answers == ("Chief of Protocol",)


@needs_data
def test_the_real_wikipedia_passages_are_read():
    passages = load_corpus(DATA / "wiki_passages.json")
    assert len(passages) == 6119
    assert passages[0].title == "Teutberga"
