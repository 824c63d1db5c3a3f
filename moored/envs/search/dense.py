"""Passages by meaning: a sentence-embedding model and the cosine to every passage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moored.envs.search.retriever import CorpusRetriever, Hit
from moored.errors import EnvError

BATCH_SIZE = 64


@dataclass
class Dense(CorpusRetriever):
    """Exact nearest passages by the embeddings of any sentence-transformers model.

    Opening it embeds the whole corpus.
    """

    model: str = ""
    """A folder or a hub id."""

    def open(self) -> None:
        from sentence_transformers import SentenceTransformer

        self.passages = self.load_passages()
        try:
            self._encoder = SentenceTransformer(self.model)
        except Exception as error:
            raise EnvError(
                f"the embedding model {self.model!r} could not be loaded ({type(error).__name__}: "
                f"{error}); give the folder or hub id of a sentence-transformers model"
            ) from error
        self._lock = threading.Lock()  # tokenizers do not like two threads
        self._embeddings_ND = self._embed([p.contents for p in self.passages])

    def close(self) -> None:
        self.passages = ()
        del self._encoder, self._embeddings_ND

    def search(self, queries: Sequence[str], num_passages: int) -> list[list[Hit]]:
        scores_QN = self._embed(queries) @ self._embeddings_ND.T
        return [self._best(scores_N, num_passages) for scores_N in scores_QN]

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        with self._lock:
            found = self._encoder.encode(
                list(texts),
                batch_size=BATCH_SIZE,
                normalize_embeddings=True,
                show_progress_bar=False,
            )
        return np.asarray(found, dtype=np.float32)

    def _best(self, scores_N: np.ndarray, num_passages: int) -> list[Hit]:
        count = min(num_passages, len(scores_N))
        rows = np.argpartition(-scores_N, count - 1)[:count]
        ranked = sorted(rows.tolist(), key=lambda row: (-scores_N[row], row))
        return [Hit(self.passages[row], float(scores_N[row])) for row in ranked]
