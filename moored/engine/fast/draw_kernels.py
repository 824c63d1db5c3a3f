"""Triton kernels that draw a token of every row from its logits, which they read once.

The vocabulary is divided into chunks. The first kernel weighs each chunk of each row, so that all
of the GPU reads; the second picks a chunk of each row and then a token of it. Sums are in float32.
"""

# Triton comes with the GPU builds of torch alone.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from moored.engine.fast.decode_kernels import overlap_options, wait_for_inputs
from moored.engine.fast.rows import MAX_STOPS

CHUNK = 2048
"""Tokens of a chunk."""


@triton.jit
def _factor(inverse_temperature):
    """Temperature 0 is stored as an inverse of 0: take the likeliest, report it at 1."""
    beta = tl.load(inverse_temperature)
    return tl.where(beta == 0.0, 1.0, beta)


@triton.jit
def _weigh(
    logits,
    inverse_temperature,
    running,
    peaks,
    masses,
    V,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_live = tl.load(running + row)
    factor = _factor(inverse_temperature)
    if OVERLAPS:
        wait_for_inputs()
    if is_live != 0:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < V
        value = tl.load(logits + row * V + columns, mask=inside, other=-1e30) * factor
        value = tl.where(inside, value, -1e30)
        peak = tl.max(value)
        at = row * tl.num_programs(1) + chunk
        tl.store(peaks + at, peak)
        tl.store(masses + at, tl.sum(tl.where(inside, tl.exp(value - peak), 0.0)))


@triton.jit
def _mix(seed, count):
    """SplitMix64 of the count-th state after `seed`: a uniform number in (0, 1)."""
    z = seed.to(tl.uint64) + (count.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return ((z >> 40).to(tl.float32) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def _pick(masses, target, SIZE: tl.constexpr):
    """First place where the sum of `masses` up to it reaches the target, and the sum before it."""
    places = tl.arange(0, SIZE)
    sums = tl.cumsum(masses)
    hit = (sums >= target) & (masses > 0.0)
    first = tl.min(tl.where(hit, places, SIZE))
    # Rounding may leave the sum short of the target: then the last place with mass.
    last = tl.max(tl.where(masses > 0.0, places, 0))
    found = tl.where(first < SIZE, first, last)
    return found, tl.sum(tl.where(places < found, masses, 0.0))


@triton.jit
def _draw(
    logits,
    inverse_temperature,
    peaks,
    masses,
    stops,
    max_tokens,
    seeds,
    requests,
    tokens,
    cells,
    counts,
    running,
    out_tokens,
    out_logps,
    V,
    out_stride,
    num_chunks,
    NUM_STOPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_live = tl.load(running + row)
    if OVERLAPS:
        wait_for_inputs()
    if is_live != 0:
        factor = _factor(inverse_temperature)
        is_greedy = tl.load(inverse_temperature) == 0.0
        chunks = tl.arange(0, CHUNKS)
        exists = chunks < num_chunks
        own_peaks = tl.load(peaks + row * num_chunks + chunks, mask=exists, other=-1e30)
        own_masses = tl.load(masses + row * num_chunks + chunks, mask=exists, other=0.0)
        peak = tl.max(own_peaks)
        shares = own_masses * tl.exp(own_peaks - peak)
        mass = tl.sum(shares)
        count = tl.load(counts + row)
        target = _mix(tl.load(seeds + row), count) * mass
        # The likeliest token is the first with any mass when others have none.
        target = tl.where(is_greedy, 0.0, target)
        shares = tl.where(is_greedy, (own_peaks >= peak).to(tl.float32), shares)
        chunk, passed = _pick(shares, target, CHUNKS)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < V
        line = logits + row * V
        value = tl.load(line + columns, mask=inside, other=-1e30) * factor
        weights = tl.where(inside, tl.exp(value - peak), 0.0)
        likeliest = (inside & (value >= peak)).to(tl.float32)
        place, _ = _pick(tl.where(is_greedy, likeliest, weights), target - passed, CHUNK)
        token = chunk * CHUNK + place
        request = tl.load(requests + row).to(tl.int64)
        value = tl.load(line + token) * factor
        tl.store(out_tokens + request * out_stride + count, token)
        tl.store(out_logps + request * out_stride + count, value - peak - tl.log(mass))
        tl.store(tokens + row, token)
        tl.store(counts + row, count + 1)
        tl.store(cells + row, tl.load(cells + row) + 1)
        stop_ids = tl.load(stops + tl.arange(0, NUM_STOPS))
        is_stop = tl.max((stop_ids == token).to(tl.int32))
        has_room = (count + 1 < tl.load(max_tokens)).to(tl.int32)
        tl.store(running + row, (1 - is_stop) * has_room)


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
    rows, vocabulary = logits.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocabulary))
    num_chunks = triton.cdiv(vocabulary, chunk)
    peaks, masses = logits.new_empty((2, rows, num_chunks))
    options = overlap_options(logits.device)
    _weigh[(rows, num_chunks)](
        logits,
        inverse_temperature,
        state[-1],
        peaks,
        masses,
        vocabulary,
        CHUNK=chunk,
        num_warps=4,
        **options,
    )
    _draw[(rows,)](
        logits,
        inverse_temperature,
        peaks,
        masses,
        stops,
        max_tokens,
        *state,
        *outputs,
        vocabulary,
        outputs[0].shape[1],
        num_chunks,
        NUM_STOPS=MAX_STOPS,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        num_warps=4,
        **options,
    )
