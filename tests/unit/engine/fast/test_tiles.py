"""Which products have a kernel of their own, at the shapes of Qwen2.5."""

from __future__ import annotations

import pytest
import torch

from moored.engine.fast.tiles import attention_tile, tile_of

QKV, OUT, DOWN = (1152, 896), (896, 896), (896, 4864)
"""Matrices of 0.5 B."""
SHARED_BYTES = 227 * 1024
LARGER = {"qkv, 3 B": (2560, 2048), "out, 3 B": (2048, 2048), "down, 1.5 B": (1536, 8960)}


@pytest.mark.parametrize("num_rows", [1, 16, 32, 64, 96, 128])
def test_small_matrices_have_a_kernel_of_their_own_up_to_128_rows(num_rows):
    for lines, columns in (QKV, OUT, DOWN):
        assert tile_of(num_rows, lines, columns, torch.bfloat16) is not None


@pytest.mark.parametrize("shape", LARGER.values(), ids=LARGER)
def test_large_matrices_are_left_to_the_library(shape):
    lines, columns = shape
    assert tile_of(128, lines, columns, torch.bfloat16, in_parts=True) is None


def test_many_rows_and_float32_are_left_to_the_library():
    assert tile_of(129, 896, 896, torch.bfloat16) is None
    assert tile_of(128, 896, 896, torch.float32) is None


@pytest.mark.parametrize("num_rows", [8, 32, 64, 128])
def test_only_products_that_may_be_left_in_parts_are(num_rows):
    for lines, columns in (QKV, OUT, DOWN):
        whole = tile_of(num_rows, lines, columns, torch.bfloat16)
        parts = tile_of(num_rows, lines, columns, torch.bfloat16, in_parts=True)
        assert whole is not None and whole.parts == 1
        assert parts is not None and parts.parts > 1


def test_gated_products_are_divided_by_rows_and_lines_alone():
    # SmolLM2-135M: 2 x 1,536 lines of 576; Qwen2.5-0.5B: 2 x 4,864 of 896.
    tile = tile_of(128, 3072, 576, torch.bfloat16, gated=True)
    assert tile is not None and tile.parts == 1
    assert tile_of(128, 9728, 896, torch.bfloat16, gated=True) is None


@pytest.mark.parametrize(
    ("lines", "columns", "more"),
    [(4864, 896, 0), (8960, 1536, 16), (11008, 2048, 32)],
    ids=["0.5 B", "1.5 B", "3 B"],
)
def test_wide_gated_products_have_as_many_programs_as_run_at_once(lines, columns, more):
    # 76 of 64 lines; 112 of 80; 115 of 96.
    tile = tile_of(128, 2 * lines, columns, torch.bfloat16, gated=True, copies=True)
    assert tile is not None and tile.is_wide
    assert (tile.rows, tile.lines, tile.more_lines, tile.parts) == (128, 64, more, 1)
    few = tile_of(12, 2 * lines, columns, torch.bfloat16, gated=True, copies=True)
    assert few is not None and few.rows == 64
    assert tile_of(8, 2 * lines, columns, torch.bfloat16, gated=True, copies=True) is None
    # Both factors, for each stage: no more than an H200 has.
    for each in (tile, few):
        numbers = each.rows + 2 * (each.lines + each.more_lines)
        assert each.stages * each.columns * numbers * 2 <= SHARED_BYTES


def test_wide_products_are_divided_into_parts_that_run_at_once():
    def parts(lines, columns, num_rows=128):
        tile = tile_of(num_rows, lines, columns, torch.bfloat16, in_parts=True, copies=True)
        assert tile is not None and tile.is_wide
        return tile.parts

    # 32 programs of 64 lines four times, 48 and 56 twice; 2,048 columns are enough for four.
    assert (parts(2048, 11008), parts(2048, 2048), parts(2048, 2048, 8)) == (4, 4, 4)
    assert (parts(3072, 8192), parts(3584, 18944)) == (2, 2)
    # 14 eight times; of few rows, and of shorter lines, small matrices have their own kernels.
    assert parts(896, 4864) == 8
    for rows, columns in ((32, 4864), (128, 896)):
        tile = tile_of(rows, 896, columns, torch.bfloat16, in_parts=True, copies=True)
        assert tile is not None and not tile.is_wide


def test_products_that_do_not_suit_the_copy_engine_are_left_to_the_library():
    # 7 B: 18,944 lines make 198 programs of 96. 5,120 lines make 80 of 64, too many for parts.
    assert tile_of(128, 2 * 18944, 3584, torch.bfloat16, gated=True, copies=True) is None
    assert tile_of(128, 5120, 5120, torch.bfloat16, in_parts=True, copies=True) is None
    # Lines of 2,052 numbers do not begin at multiples of 16 bytes.
    assert tile_of(128, 2048, 2052, torch.bfloat16, in_parts=True, copies=True) is None
    # Queries, keys and values cannot be left in parts.
    assert tile_of(128, 2560, 2048, torch.bfloat16, copies=True) is None
    assert tile_of(129, 22016, 2048, torch.bfloat16, gated=True, copies=True) is None


def test_attention_of_few_rows_has_more_warps():
    assert attention_tile(128 * 2, 64, 2).warps == 2
    assert attention_tile(128 * 2, 128, 2).warps == 4
    assert attention_tile(128 * 3, 64, 2).warps == 1


def test_attention_of_wide_heads_takes_fewer_cells_at_once():
    """Keys and values of two stages: 64 cells of 1,024 bytes would be 256 KiB, an H200 has 227."""
    sizes = [(64, 2), (128, 2), (256, 2), (256, 4)]
    assert [attention_tile(8, *size).cells for size in sizes] == [64, 64, 32, 16]
    assert [attention_tile(1000, *size).cells for size in sizes] == [32, 32, 32, 16]
