"""BM25: what it finds, in which order, and how fast over real passages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moored.envs.search.retriever import Bm25
from moored.envs.search.world import make_world

DATA = Path(__file__).parents[4].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real rows are not here")


def opened(tmp_path: Path, *texts: str) -> Bm25:
    path = tmp_path / "corpus.jsonl"
    rows = ({"title": f"T{i}", "text": text} for i, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = Bm25(str(path))
    index.open()
    return index


def titles(index: Bm25, query: str, num_passages: int = 5) -> list[str]:
    (hits,) = index.search([query], num_passages)
    return [hit.passage.title for hit in hits]


def test_rare_words_weigh_more_than_common_ones(tmp_path):
    index = opened(tmp_path, "ship gull", "ship town", "ship heron", "ship ship ship")
    assert titles(index, "ship heron")[0] == "T2"


def test_words_are_found_in_other_forms_and_in_any_case(tmp_path):
    index = opened(tmp_path, "She was climbing the mountains of Zürich.", "nothing")
    assert titles(index, "CLIMB mountain") == ["T0"]
    assert titles(index, "zurich") == ["T0"]


def test_among_equal_scores_the_earlier_passage_comes_first(tmp_path):
    index = opened(tmp_path, *["the same words"] * 400)
    assert titles(index, "same", 7) == ["T0", "T1", "T2", "T3", "T4", "T5", "T6"]


@pytest.mark.parametrize(
    "query", ["", "?!", "*", "[a TO z]", "title:town", "a AND", '"', "(((", "/.*/", "~2", "town^9"]
)
def test_a_query_is_words_and_never_syntax(tmp_path, query):
    index = opened(tmp_path, "a small place", "b")
    expected = ["T0"] if "a" in query.lower().split() or "[a" in query else []
    assert titles(index, query) == expected


def test_many_threads_get_what_one_does():
    index = Bm25()
    index.open()
    queries = [passage.title for passage in make_world().passages[:200]]
    alone = [titles(index, query) for query in queries]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda query: titles(index, query), queries)) == alone


@pytest.fixture(scope="module")
def wikipedia() -> Iterator[Bm25]:
    index = Bm25(str(DATA / "wiki_passages.json"))
    index.open()
    yield index
    index.close()


@needs_data
def test_real_titles_are_in_the_top_five_in_90_percent(wikipedia):
    # benchmarks/search.py does the same with 10,000 queries, and measures their time.
    passages = random.Random(0).choices(wikipedia.passages, k=1000)
    found = [passage.title in titles(wikipedia, passage.title) for passage in passages]
    assert sum(found) >= 900


@needs_data
def test_an_index_of_real_passages_has_one_segment_so_that_ties_are_not_random(wikipedia):
    assert wikipedia.num_segments == 1
