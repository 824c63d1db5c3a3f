"""Dense retrieval with a tiny embedding model, made here."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from moored.envs import format_reply
from moored.envs.mix import open_env
from moored.envs.search.dense import Dense
from moored.errors import EnvError

WORDS = ["amber", "door", "river", "gull", "town", "kirham", "is", "a", "the"]
pytestmark = [
    pytest.mark.skipif(not find_spec("sentence_transformers"), reason="needs moored[dense]"),
    # Importing the package warns of what it will rename.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The mean of random word vectors, saved as a sentence-transformers model."""
    import numpy as np
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    numbers = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    vectors = np.random.default_rng(0).normal(size=(len(numbers), 16)).astype(np.float32)
    words = StaticEmbedding(tokenizer, embedding_weights=vectors)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    SentenceTransformer(modules=[words], device="cpu").save(str(folder))
    return str(folder)


def corpus(tmp_path: Path, *texts: str) -> str:
    path = tmp_path / "corpus.jsonl"
    rows = ({"title": text.split()[0], "text": text} for text in texts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_passage_that_equals_the_query_comes_first_with_cosine_one(tmp_path, model):
    index = Dense(corpus(tmp_path, "amber door", "river gull", "town kirham"), model=model)
    index.open()
    queries = [passage.contents for passage in index.passages]
    for passage, hits in zip(index.passages, index.search(queries, 2), strict=True):
        assert hits[0].passage == passage
        assert hits[0].score == pytest.approx(1.0, abs=1e-5)
        assert len(hits) == 2 and hits[1].score <= hits[0].score


def test_no_more_passages_than_there_are(tmp_path, model):
    index = Dense(corpus(tmp_path, "amber door"), model=model)
    index.open()
    assert len(index.search(["river"], 5)[0]) == 1


def test_the_environment_searches_by_meaning(tmp_path, model):
    questions = tmp_path / "questions.jsonl"
    rows = ({"question": f"Where is door {i}?", "answer": "Kirham"} for i in range(100))
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"retriever": "dense", "embedding_model": model, "questions": str(questions)}
    with open_env("search", corpus=corpus(tmp_path, "kirham is a town"), **options) as env:
        env.reset(0)
        found = env.step(format_reply("", "search[the town]")).observation
        assert "[1] kirham\nkirham is a town" in found


def test_a_model_that_is_not_one_is_explained(tmp_path):
    index = Dense(corpus(tmp_path, "amber door"), model=str(tmp_path / "gone"))
    with pytest.raises(EnvError, match=r"gone' could not be loaded .* give the folder or hub id"):
        index.open()
