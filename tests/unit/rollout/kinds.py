"""Kinds of tokenizers that texts are tried with: arguments of `toy_tokenizer.make_tokenizer`."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "byte_level": {},
    "fused": {"fused": True, "vocab_size": 560},
    "tag_tokens": {"tag_tokens": True},
    "sentencepiece": {"sentencepiece": True},
}
