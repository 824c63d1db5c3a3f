"""The shop's search engine: an inverted index with BM25 weights (Robertson and Zaragoza, 2009)."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from moored.envs.webshop.matching import STOP_WORDS, WORD

K1, B = 0.9, 0.4
"""Lucene's settings in WebShop."""
MAX_QUERY_WORDS = 64


Postings = tuple[np.ndarray, np.ndarray]
"""The documents that hold a word, and what it adds to the score of each."""


class SearchIndex:
    """Texts that can be searched by words."""

    def __init__(self, texts: Iterable[str]) -> None:
        found: dict[str, tuple[array[int], array[int]]] = {}
        lengths = array("i")
        for document, text in enumerate(texts):
            words = split_words(text)
            lengths.append(len(words))
            for word, count in Counter(words).items():
                documents, counts = found.setdefault(word, (array("i"), array("i")))
                documents.append(document)
                counts.append(count)
        self.num_documents = len(lengths)
        lengths_N = np.array(lengths, dtype=np.float64)
        norm_N = K1 * (1 - B + B * lengths_N / max(lengths_N.mean(), 1.0)) if lengths else lengths_N
        self._postings = {
            word: _weigh(np.array(documents), np.array(counts), norm_N)
            for word, (documents, counts) in found.items()
        }

    def search(self, query: str, num_hits: int) -> list[int]:
        """The best documents, best first; of equal ones the earlier. Unknown words are ignored."""
        words = list(dict.fromkeys(split_words(query)[:MAX_QUERY_WORDS]))
        postings = [self._postings[word] for word in words if word in self._postings]
        if not postings:
            return []
        scores_N = np.zeros(self.num_documents)
        for documents, weights in postings:
            scores_N[documents] += weights
        hits = np.flatnonzero(scores_N)
        if len(hits) > num_hits:
            threshold = np.partition(scores_N[hits], -num_hits)[-num_hits]
            hits = hits[scores_N[hits] >= threshold]
        order = np.lexsort((hits, -scores_N[hits]))[:num_hits]
        return hits[order].tolist()


def split_words(text: str) -> list[str]:
    """Words in lower case without stop words; a plural's s is cut off, so that shoe finds shoes."""
    return [_stem(word) for word in WORD.findall(text.lower()) if word not in STOP_WORDS]


def _stem(word: str) -> str:
    is_plural = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
    return word[:-1] if is_plural else word


def _weigh(documents: np.ndarray, counts: np.ndarray, norm_N: np.ndarray) -> Postings:
    rarity = math.log(1 + (len(norm_N) - len(documents) + 0.5) / (len(documents) + 0.5))
    return documents, rarity * counts / (counts + norm_N[documents])
