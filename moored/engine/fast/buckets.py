"""A few sizes to round up to, so that what is recorded for a size is used again."""

TILE_ROWS = 128
"""Rows of a tile of the library's large products: fewer take as long."""


def bucket(size: int, least: int) -> int:
    """The next of `least` times 1, 1.5, 2, 3, 4, 6, …: few sizes, little padding."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def tile_bucket(size: int, least: int) -> int:
    """As `bucket`; between 256 and 1,024 every number of whole tiles, because each takes longer."""
    if 2 * TILE_ROWS < size < 8 * TILE_ROWS:
        return -(-size // TILE_ROWS) * TILE_ROWS
    return bucket(size, least)


def power_bucket(size: int, least: int, base: int) -> int:
    """The next of `least` times powers of `base`, where more costs little."""
    while least < size:
        least *= base
    return least
