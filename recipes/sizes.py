"""The embedded models: architecture and training of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Architecture of an embedded model, and how it is trained."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    learning_rate: float
    num_steps: int
    num_dialogues: int
    batch_tokens: int = 32_768
    """Tokens of one optimizer step, padding included."""


SIZES = {
    "nano": Size(128, 5, 4, 384, learning_rate=3e-3, num_steps=8000, num_dialogues=250_000),
    "mini": Size(256, 6, 8, 768, learning_rate=1.5e-3, num_steps=8000, num_dialogues=300_000),
}
