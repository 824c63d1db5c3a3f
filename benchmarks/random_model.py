"""Write a random model of a real shape in Hugging Face format, for benchmarks that load a folder.

    python benchmarks/random_model.py 0.5b FOLDER [--dtype bfloat16]

The tokenizer is that of `nano`: ids beyond it are sampled all the same, and decode to nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sizes import SHAPES
from transformers import AutoModelForCausalLM, AutoTokenizer

from moored.models.load import embedded_models


def write_model(shape: str, folder: Path, dtype: torch.dtype) -> None:
    """Weights and tokenizer; the same weights for the same shape."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_models()["nano"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a random model of a real shape.")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args(words)
    write_model(arguments.shape, arguments.folder, getattr(torch, arguments.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
