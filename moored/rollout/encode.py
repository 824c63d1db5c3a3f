"""Text to token ids, piece by piece: the pieces of a dialogue that were seen before are not encoded
again. What stands on either side of a special token is encoded independently of the other side, and
so are lines, for tokenizers of which that is known."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from itertools import chain, pairwise, product
from typing import TYPE_CHECKING, cast

import numpy as np

from moored.errors import MooredError
from moored.reply import TAGS
from moored.rollout.special import HIDDEN, SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

CACHED_PIECES = 8192
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
"""Where texts are cut: not beside white space, which a tokenizer may join to the line end."""
_SIDES = string.punctuation + "aZ9√é漢"
"""What is tried before and after the end of a line."""


class ChunkEncoder:
    """Encodes texts with a tokenizer, and keeps the ids of pieces.

    Special tokens that were hidden with `special` are ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special = SpecialTokens(tokenizer)
        self._borders = _find_borders(tokenizer)
        self._ids: dict[str, np.ndarray] = {}
        self._reads_lines = _reads_lines(tokenizer)

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
        """Ids of each chunk; pieces that are not known are encoded together."""
        cut = [self._pieces(chunk) for chunk in chunks]
        known = self._known(chain.from_iterable(cut))
        return [
            known[pieces[0]]
            if len(pieces) == 1
            else np.concatenate([known[piece] for piece in pieces])
            for pieces in cut
        ]

    def _pieces(self, chunk: str) -> list[str]:
        """A chunk cut into pieces; one that is known as a piece, e.g. the end of a turn, is one."""
        is_one = not self._reads_lines or chunk in self._ids or HIDDEN in chunk
        return [chunk] if is_one else cut_lines(chunk)

    def _known(self, pieces: Iterable[str]) -> dict[str, np.ndarray]:
        """The cache, with all of these pieces in it."""
        wanted = dict.fromkeys(pieces)
        unknown = [piece for piece in wanted if piece not in self._ids]
        if unknown and len(self._ids) >= CACHED_PIECES:
            self._ids.clear()
            unknown = list(wanted)
        if unknown:
            has_hidden = any(HIDDEN in piece for piece in unknown)
            found = map(self.special.encode, unknown) if has_hidden else self._encode_batch(unknown)
            arrays = (np.array(ids, dtype=np.int64) for ids in found)
            self._ids.update(zip(unknown, arrays, strict=True))
        return self._ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of many texts; straight from the backend, because its wrapper takes longer."""
        if self._tokenizer.is_fast:
            backend = cast("TokenizersBackend", self._tokenizer).backend_tokenizer
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in found]
        return cast(list[list[int]], self._tokenizer(texts, add_special_tokens=False).input_ids)


def cut_lines(text: str) -> list[str]:
    """The text cut at `_LINE_END`, which takes twice as long where no line has white space around
    it, as in most observations.
    """
    lines = text.split("\n")
    if "" in lines or list(map(str.strip, lines)) != lines:
        return _LINE_END.split(text)
    return [*(f"{line}\n" for line in lines[:-1]), lines[-1]]


def _reads_lines(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True when the ids of a line do not depend on the lines around it.

    So it is where texts are cut into words before anything else is done, and tries show a cut at
    the end of a line, whatever stands before and after.
    """
    if not tokenizer.is_fast:
        return False
    from tokenizers.normalizers import NFC

    backend = cast("TokenizersBackend", tokenizer).backend_tokenizer
    is_plain = backend.normalizer is None or isinstance(backend.normalizer, NFC)
    added = tokenizer.added_tokens_decoder.values()
    if not is_plain or backend.pre_tokenizer is None:
        return False
    if any(t.lstrip or t.rstrip or t.single_word or "\n" in t.content for t in added):
        return False

    def words(text: str) -> list[str]:
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    firsts, seconds = {c: words(f"{c}\n") for c in _SIDES}, {c: words(c) for c in _SIDES}
    tried = product(_SIDES, repeat=2)
    return all(words(f"{a}\n{b}") == firsts[a] + seconds[b] for a, b in tried)


def _find_borders(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Special tokens: what stands on either side of one is encoded independently."""
    special = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special and not (token.lstrip or token.single_word)
    ]
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if special else None


def check_ids(
    tokenizer: PreTrainedTokenizerBase, template_ids: np.ndarray, vocabulary: int
) -> None:
    """Refuse a tokenizer whose texts have ids that a model with so many embeddings does not know.

    Other special tokens than those in `template_ids` do no harm, because no text becomes them: the
    text-only models of Gemma 3 have no embedding for the one that stands for an image.
    """
    added = tokenizer.added_tokens_decoder.items()
    unused = {i for i, token in added if token.special and token.content not in TAGS}
    of_texts = set(tokenizer.get_vocab().values()) - unused
    largest = max(of_texts | set(template_ids.tolist()))
    if largest >= vocabulary:
        raise MooredError(
            f"the tokenizer {tokenizer.name_or_path!r} has ids up to {largest:,}, but the model "
            f"has embeddings for {vocabulary:,} ids only; give it the tokenizer that it was "
            f"trained with, or enlarge it with resize_token_embeddings({largest + 1}) and save it "
            f"again"
        )
