"""Ids to text: the same as the tokenizer gives, whether joined from cached texts or decoded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from moored.rollout.decode import Decoder
from tests.unit.rollout.kinds import KINDS

REPLY = "<think>The box is at (1, 2).</think><answer>Up || Left</answer>"


def decoder_of(tokenizer) -> Decoder:
    return Decoder(tokenizer, anchor=tokenizer.encode("a", add_special_tokens=False))


@pytest.fixture(scope="module")
def tokenizers(toy_tokenizer) -> dict:
    return {kind: toy_tokenizer.make_tokenizer("chatml", **KINDS[kind]) for kind in KINDS}


@pytest.fixture(scope="module")
def decoders(tokenizers) -> dict[str, Decoder]:
    return {kind: decoder_of(tokenizer) for kind, tokenizer in tokenizers.items()}


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), data=st.data())
def test_any_ids_decode_to_what_the_tokenizer_says(tokenizers, decoders, kind, data):
    """Tokens of half a character, special tokens and unknown ids among them."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=12))
    assert decoders[kind].decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["byte_level", "fused", "tag_tokens"])
def test_a_text_of_known_tokens_is_joined_without_the_tokenizer(tokenizers, monkeypatch, kind):
    decoder = decoder_of(tokenizers[kind])
    ids = tokenizers[kind].encode(REPLY, add_special_tokens=False)
    assert decoder.decode(ids) == REPLY
    monkeypatch.setattr(decoder, "_tokenizer", None)
    assert decoder.decode([*ids, *ids]) == REPLY * 2


def test_a_decoder_that_strips_spaces_is_asked_for_the_whole_text(tokenizers, decoders):
    ids = tokenizers["sentencepiece"].encode("Up Left", add_special_tokens=False)
    texts = [decoders["sentencepiece"]._decode_piece(token) for token in ids]
    assert "".join(texts) == " Up Left"
    assert decoders["sentencepiece"].decode(ids) == "Up Left"
