"""Finding passages: what a retriever is, and the embedded one, BM25 by tantivy.

A retriever is a `Resource`: the environments of a run share one. `search` may be called from many
threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moored.envs.base import Resource
from moored.envs.search.corpus import Passage, load_corpus
from moored.envs.search.world import make_world

if TYPE_CHECKING:
    import tantivy

FIELDS = ("title", "text")
MIN_HEAP_BYTES = 64 << 20
MAX_HEAP_BYTES = 4000 << 20
"""tantivy takes less than 4 GiB per thread."""
HEAP_PER_CHAR = 8
"""More than an index needs while it is built: a second segment would make ties random."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, and how well it fits."""

    passage: Passage
    score: float


@dataclass
class Retriever(Resource, ABC):
    """Base of all retrievers."""

    @abstractmethod
    def search(self, queries: Sequence[str], num_passages: int) -> list[list[Hit]]:
        """For each query at most this many passages, the best first."""


@dataclass
class CorpusRetriever(Retriever):
    """Base of the retrievers that hold their passages in memory."""

    corpus: str | None = None
    """File of passages; None: the fictional world of `world_seed`."""
    world_seed: int = 0

    def __post_init__(self) -> None:
        self.passages: tuple[Passage, ...] = ()
        """What is searched, while it is open."""

    def load_passages(self) -> tuple[Passage, ...]:
        if self.corpus is None:
            return make_world(self.world_seed).passages
        return load_corpus(self.corpus)


@dataclass
class Bm25(CorpusRetriever):
    """BM25 over title and text, each its own field, of words in lower case without their endings.

    Among equal scores the earlier passage comes first, so results are the same in every process.
    """

    def open(self) -> None:
        self.passages = self.load_passages()
        self._analyzer = _make_analyzer()
        self._index = _build_index(self.passages, self._analyzer)
        self._searcher = self._index.searcher()

    def close(self) -> None:
        self.passages = ()
        del self._analyzer, self._index, self._searcher

    @property
    def num_segments(self) -> int:
        """Parts of the index; more than one would make the order of equal scores random."""
        return self._searcher.num_segments

    def search(self, queries: Sequence[str], num_passages: int) -> list[list[Hit]]:
        return [self._search_one(query, num_passages) for query in queries]

    def _search_one(self, text: str, num_passages: int) -> list[Hit]:
        import tantivy

        words = dict.fromkeys(self._analyzer.analyze(text))
        # Built from words and never parsed: a query cannot hold a wildcard, a range or a field.
        terms = [
            (
                tantivy.Occur.Should,
                tantivy.Query.term_query(self._index.schema, field, word, "freq"),
            )
            for word in words
            for field in FIELDS
        ]
        if not terms:
            return []
        found = self._searcher.search(tantivy.Query.boolean_query(terms), num_passages, count=False)
        addresses = [address for _, address in found.hits]
        rows = map(int, self._searcher.fast_field_values("row", addresses))  # pyright: ignore
        ranked = sorted((-score, row) for (score, _), row in zip(found.hits, rows, strict=True))
        return [Hit(self.passages[row], -score) for score, row in ranked]


def _make_analyzer() -> tantivy.TextAnalyzer:
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    filters = (
        Filter.remove_long(60),
        Filter.lowercase(),
        Filter.ascii_fold(),
        Filter.stemmer("english"),
    )
    builder = TextAnalyzerBuilder(Tokenizer.simple())
    for step in filters:
        builder = builder.filter(step)
    return builder.build()


def _build_index(passages: Sequence[Passage], analyzer: tantivy.TextAnalyzer) -> tantivy.Index:
    """An index in memory, in one segment."""
    import tantivy

    builder = tantivy.SchemaBuilder()
    for name in FIELDS:
        builder.add_text_field(name, tokenizer_name="moored", index_option="freq")
    builder.add_integer_field("row", fast=True)
    index = tantivy.Index(builder.build())
    index.register_tokenizer("moored", analyzer)
    num_chars = sum(len(passage.title) + len(passage.text) for passage in passages)
    heap = min(MIN_HEAP_BYTES + HEAP_PER_CHAR * num_chars, MAX_HEAP_BYTES)
    writer = index.writer(heap, num_threads=1)
    for row, passage in enumerate(passages):
        document = tantivy.Document(title=passage.title, text=passage.text, row=row)
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return index
