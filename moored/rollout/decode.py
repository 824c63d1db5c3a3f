"""Token ids to text, and back from places in the text to tokens.

Texts of single tokens are kept. Where tokens stand for bytes a reply is joined from them, which
takes half as long as the tokenizer and lets no other thread in between.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED_PIECES = 1 << 16
_BROKEN = "\ufffd"
"""What decoders write for bytes that make no character."""


class Decoder:
    """Decodes ids with a tokenizer, special tokens kept: the tags may be such tokens.

    `anchor` are ids of any text; behind them decoders do not strip the first space of a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, anchor: list[int]) -> None:
        self._tokenizer = tokenizer
        self._has_plain_decode = _has_plain_decode(tokenizer)
        self._joins_tokens = _joins_tokens(tokenizer)
        self._pieces = _Pieces(self._decode_piece)
        self._anchor = anchor
        self._anchor_chars = len(self._decode(anchor))

    def decode(self, ids: list[int]) -> str:
        if self._joins_tokens:
            text = "".join(map(self._pieces.__getitem__, ids))
            if _BROKEN not in text:
                return text
        return self._decode(ids)

    def ends(self, ids: list[int], body: str) -> list[int]:
        """How many characters are whole after 0, 1, 2, … tokens, from cached texts of tokens."""
        texts = list(map(self._pieces.__getitem__, ids))
        joined = "".join(texts)
        if _BROKEN in joined:
            self._join_broken(ids, texts)
            joined = "".join(texts)
        if not joined.endswith(body):
            return self._ends_by_prefix(ids, body)
        ends = list(accumulate(map(len, texts), initial=0))
        # Some decoders strip the space before the first word.
        num_stripped = len(joined) - len(body)
        return [max(end - num_stripped, 0) for end in ends] if num_stripped else ends

    def _join_broken(self, ids: list[int], texts: list[str]) -> None:
        """Where several tokens make one character, give the text of all to the last of them."""
        run: list[int] = []
        for index, text in enumerate(texts):
            if _BROKEN not in text:
                run = []
                continue
            if run:
                texts[index - 1] = ""
            run.append(ids[index])
            texts[index] = self._pieces[tuple(run)]
            if not texts[index].endswith(_BROKEN):
                run = []

    def _ends_by_prefix(self, ids: list[int], body: str) -> list[int]:
        """The same for decoders whose tokens change each other's text; quadratic."""
        prefixes = (self._decode(ids[:stop]) for stop in range(len(ids) + 1))
        ends = list(accumulate((common_length(text, body) for text in prefixes), max))
        assert ends[-1] >= len(body), "the ids decode to this text"
        return ends

    def _decode(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        # `decode` first checks the type of every id, which takes longer than decoding.
        decode = self._tokenizer._decode if self._has_plain_decode else self._tokenizer.decode
        text = decode(ids, **options)
        assert isinstance(text, str)
        return text

    def _decode_piece(self, *ids: int) -> str:
        """Text of tokens inside a reply."""
        return self._decode([*self._anchor, *ids])[self._anchor_chars :]


def _has_plain_decode(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True when `decode` of a list of ids only calls `_decode`."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).decode is PreTrainedTokenizerBase.decode


def _joins_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True when the text of whole characters is the texts of their tokens, one after the other.

    So it is where tokens stand for bytes: joining cached texts is faster than decoding.
    """
    from tokenizers.decoders import ByteLevel
    from transformers import TokenizersBackend

    if not isinstance(tokenizer, TokenizersBackend) or not _has_plain_decode(tokenizer):
        return False
    is_plain = type(tokenizer)._decode is TokenizersBackend._decode
    return is_plain and isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)


class _Pieces(dict[int | tuple[int, ...], str]):
    """Texts of tokens, and of runs of tokens, each decoded when it is first asked for."""

    def __init__(self, decode: Callable[..., str]) -> None:
        self._decode = decode

    def __missing__(self, key: int | tuple[int, ...]) -> str:
        bound(self, CACHED_PIECES)
        self[key] = self._decode(*key) if isinstance(key, tuple) else self._decode(key)
        return self[key]


def bound(cache: dict, size: int) -> None:
    """Forget the older half once a cache is full; what was added last is asked for next."""
    if len(cache) >= size:
        for key in list(cache)[: size // 2]:
            del cache[key]


def common_length(a: str, b: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
