"""Attention of continuations to the prompt they share and to themselves, without a mask.

Two passes of flash attention cover a line of packed tokens (`packing.Tree`): every stretch, be it
a prompt or a continuation, sees itself causally; the continuations of a prompt see all of it. The
two are merged by their log-sum-exps. Gradients are exact: each pass runs backwards with the merged
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from moored.engine.packing import Tree
from moored.models.fast_shape import LLAMA_SHAPED, head_width
from moored.models.lengths import sliding_window

NAME = "moored_tree"
CHUNK = 8
"""Continuations of similar length that a CPU computes together, padded."""
WIDTH_MULTIPLE, MAX_WIDTH = 8, 256
"""Head widths that flash attention on a GPU knows."""

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._flash_attention_forward
_cuda_backward = torch.ops.aten._flash_attention_backward


def use_tree_attention(model: Any, device: torch.device, *, bf16: bool) -> bool:
    """Switch a model over where that is possible; on a GPU flash attention needs bfloat16."""
    config = model.config
    fits = device.type == "cpu" and not bf16
    if device.type == "cuda":
        width = head_width(config)
        fits = bf16 and width % WIDTH_MULTIPLE == 0 and width <= MAX_WIDTH
    if config.model_type not in LLAMA_SHAPED or sliding_window(config) or not fits:
        return False
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(NAME)
    return True


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(1, heads, N, width) in, (1, N, heads, width) out; without a tree, what `sdpa` does."""
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    scale = scaling or query.shape[-1] ** -0.5
    return attend_tree(q, k, v, tree, scale)[None], None  # pyright: ignore[reportCallIssue]


@torch.compiler.disable
def attend_tree(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float
) -> torch.Tensor:
    """q (N, heads, width), k and v (N, KV heads, width) -> (N, heads, width)."""
    return _TreeAttention.apply(q, k, v, tree, scale)  # pyright: ignore[reportReturnType]


class _TreeAttention(torch.autograd.Function):
    """q (N, heads, width), k and v (N, KV heads, width) -> (N, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float
    ) -> torch.Tensor:
        forward = _forward_cuda if q.is_cuda else _forward_cpu
        out, lse, extra = forward(q, k, v, tree, scale)
        ctx.save_for_backward(q, k, v, out, lse, *extra)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *extra = ctx.saved_tensors
        backward = _backward_cuda if q.is_cuda else _backward_cpu
        grads = backward(grad.contiguous(), q, k, v, out, lse, extra, ctx.tree, ctx.scale)
        return *grads, None, None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where stretches begin and end, as flash attention takes it: running sums from 0."""

    stretches: torch.Tensor
    """All prompts, then all continuations."""
    prompts: torch.Tensor
    continuations: torch.Tensor
    """All continuations of a prompt count as one."""
    longest_stretch: int
    longest_prompt: int
    longest_continuations: int


def bounds_of(tree: Tree, device: torch.device) -> Bounds:
    """Found once for all layers."""

    def running(lengths: Sequence[int]) -> torch.Tensor:
        return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)

    if "bounds" not in tree.prepared:
        singles = [length for members in tree.continuations for length in members if length]
        sums = [sum(members) for members in tree.continuations]
        all_stretches = [*tree.prompts, *singles]
        tree.prepared["bounds"] = Bounds(
            running(all_stretches),
            running(tree.prompts),
            running(sums),
            max(all_stretches),
            max(tree.prompts),
            max(sums),
        )
    return tree.prepared["bounds"]


def _forward_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Outputs, (heads, N) log-sum-exps, and what the backward pass wants besides."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    first, b = tree.num_prompt_tokens, bounds_of(tree, q.device)
    own = b.stretches, b.stretches, b.longest_stretch, b.longest_stretch
    out, lse, *own_extra = _cuda_forward(q, k, v, *own, 0.0, True, False, scale=scale)[:4]
    if first == len(q):
        return out, lse, own_extra
    cross = b.continuations, b.prompts, b.longest_continuations, b.longest_prompt
    seen, seen_lse, *extra = _cuda_forward(
        q[first:], k[:first], v[:first], *cross, 0.0, False, False, scale=scale
    )[:4]
    from moored.engine.fast.layer_kernels import merge

    merge(out[first:], lse[:, first:], seen, seen_lse)
    return out, lse, [*own_extra, *extra]


def _merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """One softmax over two parts, in place of the first; (n, heads, width) and (heads, n)."""
    both = torch.logaddexp(lse, other_lse)
    share, other_share = ((part - both).exp().t()[..., None] for part in (lse, other_lse))
    out.copy_(out * share + other * other_share)
    lse.copy_(both)


def _backward_cuda(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    extra: list[torch.Tensor],
    tree: Tree,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    first, b = tree.num_prompt_tokens, bounds_of(tree, q.device)
    own = b.stretches, b.stretches, b.longest_stretch, b.longest_stretch
    lse = lse.contiguous()
    dq, dk, dv = _cuda_backward(grad, q, k, v, out, lse, *own, 0.0, True, *extra[:2], scale=scale)
    if first < len(q):
        cross = b.continuations, b.prompts, b.longest_continuations, b.longest_prompt
        dq_2, dk_2, dv_2 = _cuda_backward(
            grad[first:],
            q[first:],
            k[:first],
            v[:first],
            out[first:],
            lse[:, first:].contiguous(),
            *cross,
            0.0,
            False,
            *extra[2:],
            scale=scale,
        )
        dq[first:] += dq_2
        dk[:first] += dk_2
        dv[:first] += dv_2
    return dq, dk, dv


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    k, v = _repeat(k, q), _repeat(v, q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for queries, keys in _passes(tree):
        mixed, sums = _cpu_forward(
            queries.of(q), keys.of(k), keys.of(v), 0.0, queries is keys, scale=scale
        )
        mixed, sums = mixed.transpose(1, 2).flatten(0, 1), sums.transpose(0, 1).flatten(1)
        if queries is not keys:
            part = slice(queries.start, queries.stop)
            _merge(out[part], lse[:, part], mixed, sums)
        elif queries.real is None:
            part = slice(queries.start, queries.stop)
            out[part], lse[:, part] = mixed, sums
        else:
            tokens, real = queries.tokens.flatten()[queries.real], queries.real
            out[tokens], lse[:, tokens] = mixed[real], sums[:, real]
    return out, lse, []


def _backward_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    _: list[torch.Tensor],
    tree: Tree,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    all_k, all_v = _repeat(k, q), _repeat(v, q)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, all_k, all_v))
    for queries, keys in _passes(tree):
        upstream = queries.of(grad)
        if queries.real is not None:
            # Nothing flows back from padding.
            upstream = upstream * queries.real.view(queries.shape)[:, None, :, None]
        found = _cpu_backward(
            upstream,
            queries.of(q),
            keys.of(all_k),
            keys.of(all_v),
            queries.of(out),
            queries.of(lse.t()[..., None]).squeeze(-1).contiguous(),
            0.0,
            queries is keys,
            scale=scale,
        )
        for total, part, block in zip((dq, dk, dv), found, (queries, keys, keys), strict=True):
            block.add_to(total, part)
    if group > 1:
        dk, dv = (tensor.unflatten(1, (-1, group)).sum(dim=2) for tensor in (dk, dv))
    return dq, dk, dv


def _repeat(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The heads of a group, one for every query head."""
    group = q.shape[1] // keys.shape[1]
    return keys if group == 1 else keys.repeat_interleave(group, dim=1)


class _Block:
    """Stretches that follow one another in the line, as (n, T) tokens padded to the longest."""

    def __init__(self, start: int, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        self.start, self.stop = start, start + sum(lengths)
        self.shape = len(lengths), longest
        counts = torch.tensor(lengths)
        begins = start + counts.cumsum(0) - counts
        step = torch.arange(longest)
        # Padding repeats the last token of its stretch.
        self.tokens = begins[:, None] + torch.minimum(step, counts[:, None] - 1)
        is_regular = min(lengths) == longest
        self.real = None if is_regular else (step < counts[:, None]).flatten()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """(n, heads, T, width) of a tensor over all tokens."""
        if self.real is None:
            return tensor[self.start : self.stop].unflatten(0, self.shape).transpose(1, 2)
        return tensor[self.tokens].transpose(1, 2)

    def add_to(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """The reverse of `of`, summed up."""
        rows = part.transpose(1, 2).flatten(0, 1)
        if self.real is None:
            total[self.start : self.stop] += rows
        else:
            total.index_add_(0, self.tokens.flatten()[self.real], rows[self.real])


def _passes(tree: Tree) -> list[tuple[_Block, _Block]]:
    """Queries and keys; the same block twice is causal. Own stretches come before prompts."""
    if "passes" not in tree.prepared:
        found = []
        prompt, at = 0, tree.num_prompt_tokens
        for length, members in zip(tree.prompts, tree.continuations, strict=True):
            seen = _Block(prompt, [length])
            found.append((seen, seen))
            begin, members = at, [length for length in members if length]
            for first in range(0, len(members), CHUNK):
                block = _Block(begin, members[first : first + CHUNK])
                found.append((block, block))
                begin = block.stop
            if begin > at:
                found.append((_Block(at, [begin - at]), seen))
            prompt, at = prompt + length, begin
        tree.prepared["passes"] = found
    return tree.prepared["passes"]
