"""Write a random model of a real shape in Hugging Face format, for benchmarks that load a folder.

    python benchmarks/random_model.py 0.5b FOLDER [--dtype bfloat16] [--mean-tokens 60]

The tokenizer is that of `nano`: ids beyond it are sampled all the same, and decode to nothing.
`--mean-tokens` makes replies end at the end-of-sequence token, after so many tokens on average:
their lengths are geometric, like those of a coin that is tossed at every token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sizes import SHAPES
from transformers import AutoModelForCausalLM, AutoTokenizer

from moored.engine.device import pick_device
from moored.models.find import embedded_models

SAMPLE = (4, 128)
"""Random tokens that say how likely the end is."""
MIN_POSITIONS = 4096
"""Context that is allowed at least; rotations need no weights for it."""


def write_model(
    shape: str, folder: Path, dtype: torch.dtype, mean_tokens: float | None = None
) -> None:
    """Weights and tokenizer; the same weights for the same shape on the same kind of device."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_models()["nano"])
    torch.manual_seed(0)
    with torch.device(pick_device("auto")):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    positions = model.config.max_position_embeddings
    model.config.max_position_embeddings = max(positions, MIN_POSITIONS)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    if mean_tokens is not None:
        end_after(model, mean_tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def end_after(model: Any, mean_tokens: float) -> None:
    """Give the end-of-sequence token a probability of about 1 / `mean_tokens` everywhere.

    One entry is 1 in all embeddings and no layer adds to it, so that it is nearly the same in every
    last hidden state. The token's own entry, as its head, is what makes it so likely.
    """
    if not model.config.tie_word_embeddings:
        raise SystemExit("--mean-tokens is for shapes with tied embeddings")
    weight, end = model.get_input_embeddings().weight, model.config.eos_token_id
    weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    weight[end] = weight.mean(dim=0)
    ids = torch.randint(len(weight), SAMPLE, device=weight.device)
    hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
    logits = (hidden @ weight.T).float()
    ahead = logits[:, end] - logits.logsumexp(dim=1)
    entry = hidden[:, 0].float()
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        chance = torch.sigmoid(ahead + middle * entry).mean().item()
        low, high = (middle, high) if chance < 1 / mean_tokens else (low, middle)
    weight[end, 0] += low


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a random model of a real shape.")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--mean-tokens", type=float)
    arguments = parser.parse_args(words)
    dtype = getattr(torch, arguments.dtype)
    write_model(arguments.shape, arguments.folder, dtype, arguments.mean_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
