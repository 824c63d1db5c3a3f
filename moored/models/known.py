"""Shapes of models of the Hugging Face hub, so that planning with them downloads nothing.

The numbers are those of each model's config.json. Variants such as `-Instruct` have the same shape,
but may be made for other lengths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

VARIANTS = ("-instruct", "-base", "-it")
"""Endings of a hub id that change no shape."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One line of the table, named as in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool


KNOWN: dict[str, Facts] = {
    "Qwen/Qwen2.5-0.5B": Facts("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen/Qwen2.5-1.5B": Facts("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "Qwen/Qwen2.5-3B": Facts("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, True),
    "Qwen/Qwen2.5-7B": Facts("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "Qwen/Qwen2.5-14B": Facts("qwen2", 152064, 5120, 13824, 48, 40, 8, 128, False),
    "Qwen/Qwen2.5-32B": Facts("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, False),
    "Qwen/Qwen2.5-72B": Facts("qwen2", 152064, 8192, 29568, 80, 64, 8, 128, False),
    "Qwen/Qwen3-0.6B": Facts("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "Qwen/Qwen3-1.7B": Facts("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen/Qwen3-4B": Facts("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen/Qwen3-8B": Facts("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "Qwen/Qwen3-14B": Facts("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, False),
    "Qwen/Qwen3-32B": Facts("qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
    "meta-llama/Llama-3.2-1B": Facts("llama", 128256, 2048, 8192, 16, 32, 8, 64, True),
    "meta-llama/Llama-3.2-3B": Facts("llama", 128256, 3072, 8192, 28, 24, 8, 128, True),
    "meta-llama/Llama-3.1-8B": Facts("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "meta-llama/Llama-3.1-70B": Facts("llama", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "meta-llama/Llama-3.3-70B": Facts("llama", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "HuggingFaceTB/SmolLM2-135M": Facts("llama", 49152, 576, 1536, 30, 9, 3, 64, True),
    "HuggingFaceTB/SmolLM2-360M": Facts("llama", 49152, 960, 2560, 32, 15, 5, 64, True),
    "HuggingFaceTB/SmolLM2-1.7B": Facts("llama", 49152, 2048, 8192, 24, 32, 32, 64, True),
}
QWEN25_SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
SMOLLM2_SIZES = ("135M", "360M", "1.7B")
POSITIONS: dict[str, int] = {
    **{f"Qwen/Qwen2.5-{size}-Instruct": 32768 for size in QWEN25_SIZES},
    **{f"Qwen/Qwen3-{size}": 40960 for size in QWEN3_SIZES},
    **{f"HuggingFaceTB/SmolLM2-{size}": 8192 for size in SMOLLM2_SIZES},
    **{f"HuggingFaceTB/SmolLM2-{size}-Instruct": 8192 for size in SMOLLM2_SIZES},
}
"""Tokens that a model was made for, by its whole name.

Llama 3.1, 3.2 and 3.3 have no line because they scale their angles, so that nothing bounds them.
"""
SMOLLM = "HuggingFaceTB/SmolLM2-135M"
"""What `model=smollm2` is."""


def known_facts(model: str) -> Facts | None:
    """The shape of a hub id; None where the table does not have it."""
    by_name = {name.lower(): facts for name, facts in KNOWN.items()}
    name = model.lower()
    for ending in VARIANTS:
        name = name.removesuffix(ending)
    return by_name.get(name)


def known_description(model: str) -> dict[str, object]:
    """What the config.json of a hub id says, as far as the table has it."""
    facts = known_facts(model)
    if facts is None:
        return {}
    by_name = {name.lower(): positions for name, positions in POSITIONS.items()}
    positions = by_name.get(model.lower())
    found: dict[str, object] = asdict(facts)
    return found if positions is None else {**found, "max_position_embeddings": positions}
