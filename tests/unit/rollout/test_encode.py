"""Pieces of text to ids: the same as of the whole text, whatever the tokenizer does with lines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moored.models.find import embedded_models
from moored.rollout import encode
from moored.rollout.encode import ChunkEncoder
from tests.unit.rollout.kinds import KINDS

_WORDS_OF_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "qwen": _WORDS_OF_QWEN,
    # As in o200k: a slash belongs to the line end before it.
    "slash_after_line": _WORDS_OF_QWEN.replace(r"[\r\n]*|", r"[\r\n/]*|"),
}
READS_LINES = {
    **{"byte_level": True, "tag_tokens": True, "fused": False, "sentencepiece": False},
    **{"qwen": True, "slash_after_line": False, "nano": True, "mini": True},
}
WORDS = ["\n", "\n", " ", "a", "Turn 2 of 5.", "##_P", "(1, 2)", "'s", "√", "é", "\t", "\r", "||"]
WORDS += ["<think>", "<|im_end|>", "Player: (", "12", "/", ":\n    ", "\n\n"]
BOARD = "Turn 1 of 5.\n######\n#_P_X#\n######\nPlayer: (1, 2)\n"


@pytest.fixture(scope="module")
def tokenizers(toy_tokenizer) -> dict:
    made = {kind: toy_tokenizer.make_tokenizer("chatml", **KINDS[kind]) for kind in KINDS}
    made |= {kind: _with_pattern(pattern) for kind, pattern in PATTERNS.items()}
    own = {name: AutoTokenizer.from_pretrained(path) for name, path in embedded_models().items()}
    return made | own


def _with_pattern(pattern: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that cuts texts into words by a regular expression."""
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [BOARD * 3, "def f():\n    return x\n\n" * 3, "√\n/'s /'"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def encoders(tokenizers) -> dict[str, ChunkEncoder]:
    return {kind: ChunkEncoder(tokenizer) for kind, tokenizer in tokenizers.items()}


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(list(READS_LINES)),
    words=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=30),
)
def test_pieces_encode_to_the_ids_of_the_whole_text(tokenizers, encoders, kind, words):
    text = "".join(words).encode("utf-8", "ignore").decode()
    whole = tokenizers[kind].encode(text, add_special_tokens=False)
    assert encoders[kind].encode(text).tolist() == whole


@settings(max_examples=500, deadline=None)
@given(words=st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=30))
def test_lines_are_cut_between_two_characters_that_are_no_white_space(words):
    text = "".join(words)
    borders = (
        at
        for at in range(2, len(text))
        if text[at - 1] == "\n" and not (text[at - 2].isspace() or text[at].isspace())
    )
    cuts = [0, *borders, len(text)]
    assert encode.cut_lines(text) == [text[a:b] for a, b in pairwise(cuts)]


def test_a_text_is_cut_before_every_special_token(encoders):
    encoder = encoders["byte_level"]
    found = encoder.chunks("a<|im_end|>\n<|im_start|>user")
    assert found == ["a", "<|im_end|>\n", "<|im_start|>user"]
    assert encoder.chunks("<|im_start|>a") == ["<|im_start|>a"]
    assert encoder.chunks("") == [""]


@pytest.mark.parametrize("name", ["nano", "mini"])
def test_of_a_board_that_changes_only_new_lines_are_encoded(tokenizers, monkeypatch, name):
    encoder, encoded = ChunkEncoder(tokenizers[name]), []
    encoder.encode(BOARD)
    monkeypatch.setattr(encoder, "_encode_batch", lambda texts: encoded.extend(texts) or [[1]])
    encoder.encode(BOARD.replace("#_P_X#", "#__PX#"))
    assert encoded == ["#__PX#\n"]


@pytest.mark.parametrize(("kind", "reads_lines"), READS_LINES.items())
def test_lines_are_cut_only_where_no_token_can_go_on_after_one(encoders, kind, reads_lines):
    """Of the fused kind they do; the sentencepiece kind marks the start of a text by a space."""
    assert encoders[kind]._reads_lines == reads_lines


def test_a_full_cache_still_gives_every_chunk_that_is_asked_for(encoders, monkeypatch):
    monkeypatch.setattr(encode, "CACHED_PIECES", 2)
    words = ["one", "two", "three", "four"]
    encoder = encoders["byte_level"]
    plain = [encoder.encode(word).tolist() for word in words]
    assert [ids.tolist() for ids in encoder.encode_chunks([*words, *words])] == plain * 2
