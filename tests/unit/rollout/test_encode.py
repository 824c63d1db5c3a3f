"""Chunks of text to ids, some of them remembered."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from moored.rollout import encode
from moored.rollout.encode import ChunkEncoder


def test_a_text_is_cut_before_every_special_token(toy_tokenizer):
    encoder = ChunkEncoder(toy_tokenizer.make_tokenizer("chatml"))
    assert encoder.chunks("a<|im_end|>\n<|im_start|>user") == [
        "a",
        "<|im_end|>\n",
        "<|im_start|>user",
    ]
    assert encoder.chunks("<|im_start|>a") == ["<|im_start|>a"]
    assert encoder.chunks("") == [""]


def test_chunks_encode_to_the_ids_of_the_whole_text(toy_tokenizer):
    tokenizer = toy_tokenizer.make_tokenizer("chatml")
    text = "<|im_start|>user\nTurn 1.<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert ChunkEncoder(tokenizer).encode(text).tolist() == whole


def test_a_full_cache_still_gives_every_chunk_that_is_asked_for(toy_tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "CACHED_CHUNKS", 2)
    encoder = ChunkEncoder(toy_tokenizer.make_tokenizer("chatml"))
    words = ["one", "two", "three", "four"]
    plain = [encoder.encode(word).tolist() for word in words]
    assert [ids.tolist() for ids in encoder.encode_chunks([*words, *words])] == plain * 2
