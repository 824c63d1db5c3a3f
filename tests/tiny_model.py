"""Tiny models with random weights. Tests name only the sizes that they are about."""

from __future__ import annotations

from typing import Any


def tiny_config(family: str = "llama", /, **options: object) -> Any:
    """A family's configuration: 64 tokens, 32 wide, two layers, tied embeddings, unless given."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return AutoConfig.for_model(family, **sizes | options)


def tiny_model(family: str = "llama", /, *, scale: float = 1.0, **options: object) -> Any:
    """The model of `tiny_config`; a `scale` above 1 makes it sharper, so that mistakes show."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model
