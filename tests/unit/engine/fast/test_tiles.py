"""Which products have a kernel of their own, at the shapes of Qwen2.5."""

from __future__ import annotations

import pytest
import torch

from moored.engine.fast.tiles import MANY_ROWS, GatedTile, attention_tile, gated_tile, tile_of

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
    assert tile_of(128, lines, columns, torch.bfloat16, most_parts=8) is None


def test_many_rows_and_float32_are_left_to_the_library():
    assert tile_of(129, 896, 896, torch.bfloat16) is None
    assert tile_of(128, 896, 896, torch.float32) is None


@pytest.mark.parametrize("num_rows", [8, 32, 64, 128])
def test_only_products_that_may_be_left_in_parts_are(num_rows):
    for lines, columns in (QKV, OUT, DOWN):
        whole = tile_of(num_rows, lines, columns, torch.bfloat16)
        parts = tile_of(num_rows, lines, columns, torch.bfloat16, most_parts=8)
        assert whole is not None and whole.parts == 1
        assert parts is not None and parts.parts > 1


def test_gated_products_are_divided_by_rows_and_lines_alone():
    # SmolLM2-135M: 2 x 1,536 lines of 576; Qwen2.5-0.5B: 2 x 4,864 of 896.
    tile = tile_of(128, 3072, 576, torch.bfloat16, gated=True)
    assert tile is not None and tile.parts == 1
    assert tile_of(128, 9728, 896, torch.bfloat16, gated=True) is None


@pytest.mark.parametrize(
    ("lines", "columns", "each"),
    [(4864, 896, 64), (8960, 1536, 128), (11008, 2048, 128)],
    ids=["0.5 B", "1.5 B", "3 B"],
)
def test_early_gated_products_have_no_more_programs_than_run_at_once(lines, columns, each):
    # 76 of 64 lines; 70 and 86 of 128.
    for num_rows in (3, 128):
        tile = tile_of(num_rows, 2 * lines, columns, torch.bfloat16, gated=True, copies=True)
        assert tile is not None and tile.is_early
        assert (tile.lines, tile.parts) == (each, 1)


def test_early_products_are_divided_into_parts_that_run_at_once():
    def parts(lines, columns, num_rows, most_parts=8):
        tile = tile_of(num_rows, lines, columns, torch.bfloat16, most_parts=most_parts, copies=True)
        assert tile is not None and tile.is_early
        return tile.parts

    # 32 programs of 64 lines four times, 56 twice; 14 as often as was fastest.
    assert (parts(2048, 11008, 128), parts(3584, 18944, 128)) == (4, 2)
    assert parts(896, 4864, 16) == parts(896, 4864, 128) == 6
    assert (parts(896, 896, 16), parts(896, 896, 64), parts(896, 896, 128)) == (2, 4, 3)
    # Queries, keys and values come in two at most, and 64 columns are one block.
    assert (parts(1152, 896, 16, most_parts=2), parts(1152, 896, 16, most_parts=1)) == (2, 1)
    assert parts(96, 64, 16) == 1


@pytest.mark.parametrize("num_rows", [1, 17, 33, 65, 128])
def test_blocks_of_early_products_fit_into_shared_memory(num_rows):
    for lines, columns in ((22016, 2048), (2048, 11008), (1152, 896), (96, 64)):
        for gated in (False, True):
            tile = tile_of(
                num_rows, lines, columns, torch.bfloat16, gated=gated, most_parts=8, copies=True
            )
            if tile is None:
                assert lines == 22016 and not gated
                continue
            assert tile.rows >= num_rows
            # Both factors, for each stage: no more than an H200 has.
            numbers = tile.rows + (1 + gated) * tile.lines
            assert tile.stages * tile.columns * numbers * 2 <= SHARED_BYTES
            blocks = -(-columns // tile.columns)
            assert tile.stages > 1 or -(-blocks // tile.parts) == 1


def test_products_that_do_not_suit_the_copy_engine_are_left_to_the_library():
    # 7 B: 18,944 lines make 148 programs of 128.
    assert tile_of(128, 2 * 18944, 3584, torch.bfloat16, gated=True, copies=True) is None
    # Lines of 2,052 numbers do not begin at multiples of 16 bytes.
    assert tile_of(128, 2048, 2052, torch.bfloat16, most_parts=8, copies=True) is None
    assert tile_of(129, 22016, 2048, torch.bfloat16, gated=True, copies=True) is None


def test_gated_units_of_many_rows_are_one_kernel_where_lines_are_aligned():
    half, single = torch.bfloat16, torch.float32
    assert gated_tile(MANY_ROWS, 2 * 1536, 576, half, copies=True) == GatedTile()
    assert gated_tile(MANY_ROWS - 1, 2 * 1536, 576, half, copies=True) is None
    assert gated_tile(MANY_ROWS, 2 * 1540, 576, half, copies=True) is None  # lines of outputs
    assert gated_tile(MANY_ROWS, 2 * 1536, 580, half, copies=True) is None  # lines of weights
    assert gated_tile(MANY_ROWS, 2 * 1536, 576, half, copies=False) is None
    assert gated_tile(MANY_ROWS, 2 * 1536, 576, single, copies=True) is None


def test_programs_of_early_attention_share_the_cells_of_few_rows():
    def tile(num_programs, width=128, group=8):
        return attention_tile(num_programs, group, width, 2, copies=True)

    assert [tile(n).splits for n in (2, 16, 17, 33, 34, 66, 67, 256)] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert all(tile(n).is_early for n in (2, 132, 256))
    # Keys and values of all stages: two programs have room beside each other where there are more.
    for width in (64, 128):
        for num_programs in (2, 128, 200):
            found = tile(num_programs, width)
            size = found.stages * found.cells * width * 2 * 2
            assert size <= (SHARED_BYTES if num_programs <= 132 else SHARED_BYTES // 2)
    assert not tile(32, width=32).is_early and not tile(32, group=17).is_early


def test_attention_of_few_rows_has_more_warps():
    assert attention_tile(128 * 2, 7, 64, 2).warps == 2
    assert attention_tile(128 * 2, 7, 128, 2).warps == 4
    assert attention_tile(128 * 3, 7, 64, 2).warps == 1


def test_attention_of_wide_heads_takes_fewer_cells_at_once():
    """Keys and values of two stages: 64 cells of 1,024 bytes would be 256 KiB, an H200 has 227."""
    sizes = [(64, 2), (128, 2), (256, 2), (256, 4)]
    assert [attention_tile(8, 7, *size).cells for size in sizes] == [64, 64, 32, 16]
    assert [attention_tile(1000, 7, *size).cells for size in sizes] == [32, 32, 32, 16]
