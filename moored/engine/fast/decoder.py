"""A Llama-shaped model as a short list of matrix products and kernels, for writing replies.

The sampler needs one thing fast: the next token of many sequences. This module keeps the weights
packed for that (queries, keys and values in one product, gate and up in another), the residual
stream in float32 as the learner's autocast does, and the cache in slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from moored.engine.fast import plain_ops
from moored.engine.fast.rows import Rows
from moored.engine.lora import plain_model, plain_weights
from moored.engine.passes import float_logits
from moored.models.fast_shape import head_width, is_fast_shape

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and what is copied into it."""
COPIED_AT_ONCE = 64
COPIED_BYTES = 2**25
"""After so many bytes fewer tensors are copied at once: gathered or summed ones exist for this
alone."""


def can_decode(model: Any) -> bool:
    """True for the shapes this module knows; others go through the model's own code."""
    return is_fast_shape(model.config) and model.device.type in ("cpu", "cuda", "meta")


class Decoder:
    """Packed weights and the forward pass over slots."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        *,
        shares: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """With `shares` the model's own weights become views of the packed ones.

        What an update changes is then at once what replies are written with. Not under LoRA, where
        the two differ. With a `device` the model is on the meta device, and `load` brings weights.
        """
        weights, model = dict(plain_weights(model)), plain_model(model)
        config = model.config
        self.device, self.dtype = device or model.device, dtype
        self.num_layers = config.num_hidden_layers
        self.num_heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.num_heads
        self.head_width = head_width(config)
        self.eps = config.rms_norm_eps
        self.scale = self.head_width**-0.5
        self.ops = _ops(self.device)
        self._allocate(weights, config)
        rotary = model.model.rotary_emb
        angles = rotary.inv_freq.to(self.device, torch.float32)
        self._angles = angles, float(rotary.attention_scaling)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        if device is None:
            self.load(weights.items())
        if shares:
            self._share(model)

    @torch.no_grad()
    def _share(self, model: Any) -> None:
        for name, weight in model.named_parameters():
            view = self._views[name]
            if view.dtype == weight.dtype:
                weight.data = view

    def _allocate(self, own: Mapping[str, torch.Tensor], config: Any) -> None:
        """Packed tensors, and for every name of `own` the view that takes its values."""
        width, inner = config.hidden_size, config.intermediate_size
        q, kv = self.num_heads * self.head_width, self.kv_heads * self.head_width
        self._views: dict[str, torch.Tensor] = {}

        def packed(*parts: tuple[str, int], columns: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (sum(size for _, size in parts), *([columns] if columns else []))
            whole = torch.empty(shape, dtype=dtype, device=self.device)
            at = 0
            for name, size in parts:
                self._views[name] = whole[at : at + size]
                at += size
            return whole

        def norm(name: str, size: int = width) -> torch.Tensor:
            return packed((name, size), columns=0, dtype=torch.float32)

        def linear(*parts: tuple[str, int], columns: int = width) -> torch.Tensor:
            return packed(*parts, columns=columns, dtype=self.dtype)

        self.layers: list[dict[str, Any]] = []
        for index in range(self.num_layers):
            attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            heads = [(f"{attention}.{n}_proj", s) for n, s in (("q", q), ("k", kv), ("v", kv))]
            biases = [(f"{name}.bias", size) for name, size in heads]
            has_norm = f"{attention}.q_norm.weight" in own
            self.layers.append(
                {
                    "before": norm(f"model.layers.{index}.input_layernorm.weight"),
                    "after": norm(f"model.layers.{index}.post_attention_layernorm.weight"),
                    "qkv": linear(*((f"{name}.weight", size) for name, size in heads)),
                    "qkv_bias": linear(*biases, columns=0) if biases[0][0] in own else None,
                    "norms": (
                        norm(f"{attention}.q_norm.weight", self.head_width),
                        norm(f"{attention}.k_norm.weight", self.head_width),
                    )
                    if has_norm
                    else None,
                    "out": linear((f"{attention}.o_proj.weight", width), columns=q),
                    "out_bias": linear((f"{attention}.o_proj.bias", width), columns=0)
                    if f"{attention}.o_proj.bias" in own
                    else None,
                    "gate_up": linear(
                        (f"{mlp}.gate_proj.weight", inner), (f"{mlp}.up_proj.weight", inner)
                    ),
                    "down": linear((f"{mlp}.down_proj.weight", width), columns=inner),
                }
            )
        self.final_norm = norm("model.norm.weight")
        vocabulary = own["model.embed_tokens.weight"].shape[0]
        self.embedding = linear(("model.embed_tokens.weight", vocabulary))
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else linear(("lm_head.weight", vocabulary))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a state dict into the packed tensors; what is shared is there already."""
        known = ((self._views.get(name), tensor) for name, tensor in weights)
        pairs = (
            (view, tensor)
            for view, tensor in known
            if view is not None and view.data_ptr() != tensor.data_ptr()
        )
        for some in _batches(pairs):
            into, given = zip(*some, strict=True)
            torch._foreach_copy_(list(into), list(given))  # pyright: ignore[reportPrivateImportUsage]

    def new_cache(self, num_slots: int, capacity: int) -> torch.Tensor:
        """(2, layers, slots, KV heads, capacity, head width): keys, then values."""
        self.set_capacity(capacity)
        shape = self.cache_shape(num_slots, capacity)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def cache_shape(self, num_slots: int, capacity: int) -> tuple[int, ...]:
        return 2, self.num_layers, num_slots, self.kv_heads, capacity, self.head_width

    def set_capacity(self, capacity: int) -> None:
        """Make the angles of so many positions."""
        inverse, scaling = self._angles
        angles = torch.arange(capacity, device=self.device)[:, None].float() * inverse
        self._tables = (angles.cos() * scaling).contiguous(), (angles.sin() * scaling).contiguous()

    def slot_bytes(self, capacity: int) -> int:
        """Size of one slot."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return 2 * self.num_layers * self.kv_heads * self.head_width * capacity * size

    def forward(
        self,
        cache: torch.Tensor,
        ids: torch.Tensor,
        rows: Rows,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(N, width) normalised outputs, or those of the `wanted` tokens alone.

        Keys and values of all tokens are in the cache then.
        """
        assert self._tables is not None, "make a cache first"
        ops, keys, values = self.ops, cache[0], cache[1]
        if rows.plan is None:
            rows.plan = ops.plan(rows, self._tables)
        y = torch.empty((len(ids), len(self.final_norm)), dtype=self.dtype, device=ids.device)
        gains = [*(layer["before"] for layer in self.layers), self.final_norm]
        x = ops.embed_norm(ids, self.embedding, gains[0], self.eps, y)
        parts = ops.parts_of_heads(rows, keys[0], self.num_heads)
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(y, layer["qkv"], layer["qkv_bias"], most_parts=parts)
            mixed = torch.empty(
                (len(x), self.num_heads * self.head_width), dtype=self.dtype, device=x.device
            )
            ops.attend(
                qkv,
                keys[index],
                values[index],
                self._tables,
                layer["norms"],
                mixed,
                rows,
                self.num_heads,
                self.eps,
                self.scale,
            )
            if wanted is not None and layer is self.layers[-1]:
                # All that the others still had to give are keys and values.
                x, mixed = x.index_select(0, wanted), mixed.index_select(0, wanted)
                y = y.new_empty(x.shape)
            delta = ops.finish_layer(x, mixed, layer, self.eps, y)
            ops.add_norm(x, delta, gains[index + 1], self.eps, y)
        return y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, vocabulary) in float32."""
        return float_logits(hidden, self.head)


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    some, size = [], 0
    for pair in pairs:
        some.append(pair)
        size += pair[1].nbytes
        if len(some) == COPIED_AT_ONCE or size >= COPIED_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _ops(device: torch.device) -> Any:
    if device.type != "cuda":
        return plain_ops
    from moored.engine.fast import kernels

    return kernels
