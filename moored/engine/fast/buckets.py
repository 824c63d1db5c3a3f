"""A few sizes to round up to, so that what is recorded for a size is used again."""


def bucket(size: int, least: int) -> int:
    """The next of `least` times 1, 1.5, 2, 3, 4, 6, …: few sizes, little padding."""
    power = least
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


def power_bucket(size: int, least: int, base: int) -> int:
    """The next of `least` times powers of `base`, where more costs little."""
    while least < size:
        least *= base
    return least
