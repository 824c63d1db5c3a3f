"""The operations of `kernels` in plain torch: what a CPU runs, and what the kernels must equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from moored.engine.fast.rows import Rows

_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def embed_norm(
    ids: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Lines of the embedding in float32; `out` = their RMS norm."""
    x = F.embedding(ids, embedding).float()
    out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))
    return x


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """x += delta in place (float32), then `out` = RMS norm of x."""
    x += delta
    return out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, most_parts: int = 1
) -> torch.Tensor:
    """x @ weight^T + bias, whole."""
    return F.linear(x, weight, bias)


def finish_layer(
    x: torch.Tensor, mixed: torch.Tensor, layer: Mapping[str, Any], eps: float, y: torch.Tensor
) -> torch.Tensor:
    """x += what attention gave, in place; what the gated units give, for the next `add_norm`."""
    add_norm(x, linear(mixed, layer["out"], layer["out_bias"]), layer["after"], eps, y)
    gate, up = linear(y, layer["gate_up"], None).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, layer["down"], None)


def _store(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rows: Rows,
    num_heads: int,
    eps: float,
) -> None:
    """Turn queries in place, write keys and values of N tokens into their slots."""
    _, kv_heads, _, width = keys.shape
    heads = qkv.view(len(qkv), num_heads + 2 * kv_heads, width)
    turned = heads[:, : num_heads + kv_heads]
    if norms is not None:
        turned = torch.cat(
            [
                F.rms_norm(heads[:, :num_heads].float(), (width,), norms[0], eps),
                F.rms_norm(heads[:, num_heads:-kv_heads].float(), (width,), norms[1], eps),
            ],
            dim=1,
        )
    cos, sin = rows.plan.cos_sin
    first, second = turned.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads[:, :num_heads] = turned[:, :num_heads].to(qkv.dtype)
    keys[rows.token_slots, :, rows.cells] = turned[:, num_heads:].to(keys.dtype)
    values[rows.token_slots, :, rows.cells] = heads[:, -kv_heads:]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is the same for all layers."""

    cos_sin: tuple[torch.Tensor, torch.Tensor]
    """(N, 1, half a head) angles of each token."""
    own: slice | torch.Tensor
    """Slots of the rows: a slice where row i lies in slot i."""
    hidden: torch.Tensor
    """(R, 1, T, cells) what a token must not see of its slot."""
    prefixes: Prefixes | None
    """For one token per row."""
    stretches: Stretches | None
    """For several tokens per row."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Several new tokens per row, each row with its prefix before it."""

    tokens: torch.Tensor
    """(R, T) index of each row's tokens in N; a row with fewer repeats its last."""
    prefix_slots: torch.Tensor
    prefix_cells: int
    """Longest prefix."""
    mask: torch.Tensor
    """(R, 1, T, prefix cells + cells), added to the scores."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Which rows share which of P prefixes."""

    slots: slice | torch.Tensor
    hidden: torch.Tensor
    """(P, 1, 1, cells) what is beyond the end of each."""
    members: torch.Tensor | None
    """(P, G) rows of each, filled up with its last; None: the rows lie in this order."""
    homes: tuple[torch.Tensor, torch.Tensor]
    """(R,) place of each row in `members`."""
    size: int
    """G."""
    has_prefix: torch.Tensor | None
    """(R, 1, 1, 1); None: every row has one."""


def parts_of_heads(_rows: Rows, _keys: torch.Tensor, _num_heads: int) -> int:
    """Attention takes queries, keys and values whole."""
    return 1


def plan(rows: Rows, tables: tuple[torch.Tensor, torch.Tensor]) -> Plan:
    """Find out what all layers need to know."""
    positions = rows.cells + rows.offsets
    cos, sin = (table[positions][:, None] for table in tables)
    step = torch.arange(rows.max_count)
    if rows.max_count > 1:
        step = torch.minimum(step, rows.counts[:, None] - 1)
    position = (rows.befores[:, None] + step)[:, None, :, None]
    hidden = torch.arange(int(position.max()) + 1) > position
    return Plan(
        cos_sin=(cos, sin),
        own=_as_slice(rows.slots),
        hidden=hidden,
        prefixes=_find_prefixes(rows) if rows.max_count == 1 else None,
        stretches=_find_stretches(rows, step, hidden) if rows.max_count > 1 else None,
    )


def _find_stretches(rows: Rows, step: torch.Tensor, hidden: torch.Tensor) -> Stretches:
    lengths = rows.prefix_lengths
    longest = int(lengths.max())
    beyond = (torch.arange(longest) >= lengths[:, None])[:, None, None]
    beyond = beyond.expand(-1, -1, hidden.shape[2], -1)
    blocked = torch.cat([beyond, hidden], dim=-1)
    return Stretches(
        tokens=rows.starts[:, None] + step,
        prefix_slots=rows.prefix_slots,
        prefix_cells=longest,
        mask=torch.zeros(blocked.shape).masked_fill_(blocked, -torch.inf),
    )


def _find_prefixes(rows: Rows) -> Prefixes | None:
    has_prefix = rows.prefix_lengths > 0
    if not has_prefix.any():
        return None
    # Some may see less of a prefix than others.
    base = int(rows.prefix_lengths.max()) + 1
    keys = rows.prefix_slots.long() * base + rows.prefix_lengths
    kinds, home = torch.unique(torch.where(has_prefix, keys, -1), return_inverse=True)
    sizes = torch.bincount(home)
    size = int(sizes.max())
    order = torch.argsort(home, stable=True)
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - starts[home[order]]
    members = order[starts[:, None] + torch.minimum(torch.arange(size), sizes[:, None] - 1)]
    is_regular = torch.equal(members.flatten(), torch.arange(len(order)))
    lengths = rows.prefix_lengths[members[:, 0]]
    beyond = torch.arange(int(lengths.max())) >= lengths[:, None]
    return Prefixes(
        slots=_as_slice(kinds.clamp(min=0) // base),
        hidden=beyond[:, None, None],
        members=None if is_regular else members,
        homes=(home, place),
        size=size,
        has_prefix=None if has_prefix.all() else has_prefix[:, None, None, None],
    )


def _as_slice(slots: torch.Tensor) -> slice | torch.Tensor:
    """Slots that follow one another are read in place, others are copied together."""
    start = int(slots[0])
    if torch.equal(slots.long(), torch.arange(start, start + len(slots))):
        return slice(start, start + len(slots))
    return slots


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    rows: Rows,
    num_heads: int,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """Write keys and values of N tokens into their slots, then attend to prefix and slot.

    A row's new tokens see its prefix and, causally, its own slot.
    """
    _store(qkv, keys, values, tables, norms, rows, num_heads, eps)
    p: Plan = rows.plan
    if p.stretches is not None:
        return _attend_stretches(qkv, keys, values, out, p, num_heads, scale)
    _, kv_heads, _, width = keys.shape
    # (R, KV heads, heads of the group, width)
    q = qkv.view(len(qkv), -1, width)[:, :num_heads] * scale
    q = q.view(len(qkv), kv_heads, -1, width)
    cells = p.hidden.shape[-1]
    mixed = _softmax_parts(q, keys[p.own, :, :cells], values[p.own, :, :cells], p.hidden)
    if p.prefixes is not None:
        mixed = _merge(mixed, _of_prefix(q, keys, values, p.prefixes), p.prefixes.has_prefix)
    return out.copy_(mixed[2].div_(mixed[1]).view(len(qkv), -1))


def _attend_stretches(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    p: Plan,
    num_heads: int,
    scale: float,
) -> torch.Tensor:
    s, (_, kv_heads, _, width) = p.stretches, keys.shape
    assert s is not None

    def seen(cache: torch.Tensor) -> torch.Tensor:
        own = cache[p.own, :, : p.hidden.shape[-1]]
        if not s.prefix_cells:
            return own
        return torch.cat([cache[s.prefix_slots, :, : s.prefix_cells], own], dim=2)

    mixed = F.scaled_dot_product_attention(
        qkv.view(len(qkv), -1, width)[s.tokens, :num_heads].transpose(1, 2),
        seen(keys),
        seen(values),
        attn_mask=s.mask.to(qkv.dtype),
        scale=scale,
        enable_gqa=num_heads != kv_heads,
    )
    out.view(len(qkv), num_heads, width)[s.tokens] = mixed.transpose(1, 2)
    return out


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Largest score, sum of exponentials and weighted values of one part of a softmax."""


def _softmax_parts(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> Parts:
    scores = torch.matmul(q, keys.transpose(-1, -2)).masked_fill_(hidden, -1e30)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    return peak, weights.sum(dim=-1, keepdim=True), torch.matmul(weights, values)


def _of_prefix(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, p: Prefixes) -> Parts:
    """The rows of a prefix are multiplied with it together, so it is read once for all of them."""
    num_rows, kv_heads, lines, width = q.shape
    by_prefix = q.view(-1, p.size, *q.shape[1:]) if p.members is None else q[p.members]
    together = by_prefix.transpose(1, 2).reshape(-1, kv_heads, p.size * lines, width)
    cells = p.hidden.shape[-1]
    parts = _softmax_parts(together, keys[p.slots, :, :cells], values[p.slots, :, :cells], p.hidden)
    split = [
        part.view(-1, kv_heads, p.size, lines, part.shape[-1]).transpose(1, 2) for part in parts
    ]
    if p.members is None:
        peak, total, mixed = (part.reshape(num_rows, kv_heads, lines, -1) for part in split)
    else:
        peak, total, mixed = (part[p.homes] for part in split)
    return peak, total, mixed


def _merge(a: Parts, b: Parts, has_b: torch.Tensor | None) -> Parts:
    """One softmax over both parts; rows without the second keep the first."""
    peak_b = b[0] if has_b is None else torch.where(has_b, b[0], -1e30)
    peak = torch.maximum(a[0], peak_b)
    shrink_a, shrink_b = (a[0] - peak).exp(), (peak_b - peak).exp()
    return peak, a[1] * shrink_a + b[1] * shrink_b, a[2] * shrink_a + b[2] * shrink_b


def uniforms(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """SplitMix64 of the count-th state after each seed: uniform numbers in (0, 1)."""
    z = seeds + (counts.long() + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 40).float() + 0.5) * 2.0**-24


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of a signed number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    stops: torch.Tensor,
    max_tokens: torch.Tensor,
    state: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Draw the next token of every running row by inverting its distribution function.

    `state`: (R,) seeds, requests, tokens, cells, counts, running; the last four are updated. A row
    stops at one of `stops` (MAX_STOPS,) and after `max_tokens` (1,) tokens.
    """
    seeds, requests, tokens, cells, counts, running = state
    beta = float(inverse_temperature)
    # Temperature 0 is stored as an inverse of 0: take the likeliest, report it at 1.
    scores = logits if beta in (0.0, 1.0) else logits * beta
    peak, likeliest = scores.max(dim=-1, keepdim=True)
    mass = (scores - peak).exp_().cumsum_(dim=-1)
    if beta == 0.0:
        drawn = likeliest
    else:
        targets = uniforms(seeds, counts)[:, None] * mass[:, -1:]
        drawn = torch.searchsorted(mass, targets).clamp_(max=logits.shape[-1] - 1)
    logp = scores.gather(-1, drawn) - peak - mass[:, -1:].log()
    live = running.nonzero().squeeze(-1)
    where = requests[live].long(), counts[live].long()
    outputs[0][where] = drawn[live, 0].to(outputs[0].dtype)
    outputs[1][where] = logp[live, 0]
    tokens[live] = drawn[live, 0].to(tokens.dtype)
    counts += running
    cells += running
    running *= ~torch.isin(drawn[:, 0], stops) & (counts < max_tokens)
