"""A model that knows nothing yet: tokenizer, architecture and random weights.

    python recipes/blank_model.py nano --out blank/nano
    python recipes/blank_model.py nano --recipe recipes/search.yaml --out blank/search

`moored sft` trains it from there. The same seed gives the same files, byte for byte.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.tokenizer import END, MAX_POSITIONS, PAD, RECIPE, VOCAB_SIZE, build_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Size:
    """Architecture of an embedded model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


SIZES = {"nano": Size(128, 5, 4, 384), "mini": Size(256, 6, 8, 768)}


def build_model(size: Size, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A fresh model; the same seed gives the same weights."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = tokenizer.get_vocab()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    return model.float()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("name", choices=sorted(SIZES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--recipe", type=Path, default=RECIPE, help="dialogues the tokenizer is made for"
    )
    parser.add_argument("--num-tokens", type=int, default=VOCAB_SIZE, help="of the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = build_tokenizer(options.recipe, options.num_tokens)
    model = build_model(SIZES[options.name], tokenizer, options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
