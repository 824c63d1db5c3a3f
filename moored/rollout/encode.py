"""Text to token ids, chunk by chunk: what stands on either side of a special token is encoded
independently, so the parts of a dialogue that were seen before need not be encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

CACHED_CHUNKS = 4096


class ChunkEncoder:
    """Encodes texts with a tokenizer; ids of chunks are kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._borders = _find_borders(tokenizer)
        self._ids: dict[str, np.ndarray] = {}

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate(self.encode_chunks(self.chunks(text)))

    def chunks(self, text: str) -> list[str]:
        """The text cut before every special token."""
        starts = [match.start() for match in self._borders.finditer(text)] if self._borders else []
        cuts = [0, *(start for start in starts if start), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def starts_at_border(self, text: str) -> bool:
        """True when a text begins with a special token."""
        return self._borders is not None and self._borders.match(text) is not None

    def encode_chunks(self, chunks: Iterable[str]) -> list[np.ndarray]:
        """Ids of each chunk; those that are not known are encoded together."""
        chunks = list(chunks)
        unknown = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._ids]
        if unknown:
            if len(self._ids) >= CACHED_CHUNKS:
                self._ids.clear()
                unknown = list(dict.fromkeys(chunks))
            arrays = (np.array(ids, dtype=np.int64) for ids in self._encode_batch(unknown))
            self._ids.update(zip(unknown, arrays, strict=True))
        return [self._ids[chunk] for chunk in chunks]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of many texts; straight from the backend, because its wrapper takes longer."""
        if self._tokenizer.is_fast:
            backend = cast("TokenizersBackend", self._tokenizer).backend_tokenizer
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in found]
        return cast(list[list[int]], self._tokenizer(texts, add_special_tokens=False).input_ids)


def _find_borders(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Special tokens: what stands on either side of one is encoded independently."""
    special = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and not (token.lstrip or token.single_word)
    ]
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if special else None
