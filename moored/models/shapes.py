"""The shape of a model, read from its config.json or the table of known ones; no torch, no network.

A `ModelShape` knows its parameters exactly, for the families whose layers are attention and gated
linear units. Others, and mixtures of experts, are refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from moored.errors import MooredError
from moored.models.fast_shape import is_fast_shape
from moored.models.find import check_model_name, description_here, weights_folder
from moored.models.known import KNOWN, SMOLLM, known_description


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of one type have in common."""

    has_qkv_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """Norms of queries and keys: one weight for each number of a head, or of all heads."""
    norms_per_layer: int = 2
    is_tied: bool = False
    """Whether embedding and head are one matrix where config.json does not say."""
    head_width: int | None = None
    """Where config.json does not say; None: width / heads."""


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(qk_norm="head", head_width=128),
    "smollm3": Family(is_tied=True),
    "olmo2": Family(qk_norm="all"),
    "phi3": Family(),
    "gemma2": Family(norms_per_layer=4, is_tied=True, head_width=256),
    "gemma3_text": Family(norms_per_layer=4, qk_norm="head", is_tied=True, head_width=256),
}
"""Types of models whose parameters are known from their shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with gated linear units."""

    family: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    is_tied: bool
    """Embedding and output head are one matrix."""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    norms_per_layer: int = 2
    is_fast: bool = True
    """The fast sampler knows this shape; others need a sampler with a copy of the weights."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Of the keys of all heads, and of their values."""
        return self.kv_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        width, inner, q, kv = self.width, self.inner, self.query_width, self.key_width
        attention = width * (q + 2 * kv) + q * width
        biases = self.has_qkv_bias * (q + 2 * kv) + self.has_out_bias * width
        biases += self.has_mlp_bias * (2 * inner + width)
        qk = {"none": 0, "head": 2 * self.head_width, "all": q + kv}[self.qk_norm]
        return attention + 3 * width * inner + biases + qk + self.norms_per_layer * width

    @property
    def head_parameters(self) -> int:
        """Of the output head, which is the embedding too where they are tied."""
        return self.vocabulary * self.width

    @property
    def trunk_parameters(self) -> int:
        """All but an output head of its own: what a critic has a copy of."""
        return self.layers * self.layer_parameters + self.width + self.head_parameters

    @property
    def num_parameters(self) -> int:
        return self.trunk_parameters + (0 if self.is_tied else self.head_parameters)

    @property
    def size_text(self) -> str:
        """Its parameters as people say them."""
        size = self.num_parameters
        return f"{size / 1e9:.2f} billion" if size >= 1e9 else f"{size / 1e6:.1f} million"

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer: rank x (inputs + outputs) of each, the head left out."""
        width, inner, q, kv = self.width, self.inner, self.query_width, self.key_width
        sides = (width + q) + 2 * (width + kv) + (q + width) + 3 * (width + inner)
        return self.layers * rank * sides

    def cache_bytes(self, element_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.key_width * element_bytes


def shape_from_config(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape that a config.json (or `config.to_dict()`) describes; `name` is for messages."""
    kind = str(config.get("model_type"))
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise MooredError(
            f"model {name!r} is a mixture of experts ({kind!r}), which is not planned: how many "
            f"experts a batch uses depends on its tokens; try a step with `moored train`"
        )
    if config.get("quantization_config"):
        raise MooredError(
            f"model {name!r} is quantised, which is not planned: its weights have neither the size "
            f"nor the speed of bfloat16; plan the model that it was made from"
        )
    family = FAMILIES.get(kind)
    if family is None:
        raise MooredError(
            f"model {name!r} is of type {kind!r}, whose memory is not known; plans are made for "
            f"{', '.join(FAMILIES)}; try a step with `moored train`"
        )
    size = _Sizes(config, name)
    heads, width = size.get("num_attention_heads"), size.get("hidden_size")
    head_width = size.get("head_dim", family.head_width or width // heads)
    has_bias = bool(config.get("attention_bias")) and kind != "qwen2"
    tied = config.get("tie_word_embeddings")
    return ModelShape(
        family=kind,
        layers=size.get("num_hidden_layers"),
        width=width,
        inner=size.get("intermediate_size"),
        heads=heads,
        kv_heads=size.get("num_key_value_heads", heads),
        head_width=head_width,
        vocabulary=size.get("vocab_size"),
        is_tied=family.is_tied if tied is None else bool(tied),
        has_qkv_bias=family.has_qkv_bias or has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        norms_per_layer=family.norms_per_layer,
        is_fast=is_fast_shape(SimpleNamespace(**{**_rope(config), "head_dim": head_width})),
    )


def shape_of(model: str) -> ModelShape:
    """The shape of an embedded model, a folder, an adapter's base, or a hub id of the table."""
    known = known_description(_hub_id(model))
    if known:
        return shape_from_config(known, model)
    check_model_name(model)
    file = weights_folder(model) / "config.json"
    if not file.is_file():
        raise MooredError(
            f"the shape of model {model!r} is not in the table, and plans download nothing; give a "
            f"folder with its config.json, or one of {', '.join(KNOWN)}"
        )
    return shape_from_config(json.loads(file.read_text(encoding="utf-8")), model)


def description_of(model: str) -> Mapping[str, object]:
    """What is known of a model before it is loaded: its config.json here, else the table's line.

    Empty where it is known from neither.
    """
    return description_here(model) or known_description(_hub_id(weights_folder(model).as_posix()))


def _hub_id(model: str) -> str:
    return SMOLLM if model == "smollm2" else model


class _Sizes:
    """Whole numbers of a config.json."""

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self._config = config
        self._name = name

    def get(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MooredError(
                f"the config.json of model {self._name!r} has {key} = {value!r}; give a whole "
                f"number above 0"
            )
        return value


def _rope(config: Mapping[str, object]) -> dict[str, object]:
    """The same with `rope_parameters`, which older files call `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return {**config, "rope_parameters": None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {**config, "rope_parameters": {**rope, "rope_type": kind}}
