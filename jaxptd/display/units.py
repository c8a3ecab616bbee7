"""Numbers in words: 1.50 GB, 124.44 M."""

from collections.abc import Sequence

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6))


def bytes_text(size: float) -> str:
    """Writes bytes with a decimal unit.

    >>> bytes_text(80_000_000_000), bytes_text(12)
    ('80.0 GB', '12 bytes')
    """
    return _scaled(size, _BYTES, 1) or f"{size:.0f} bytes"


def gib_text(size: float) -> str:
    """Writes bytes in GiB, the unit of tables of memory.

    >>> gib_text(2**37)
    '128.0 GiB'
    """
    return f"{size / 2**30:.1f} GiB"


def count_text(number: float) -> str:
    """Writes a number of parameters or tokens.

    >>> count_text(1_848_000), count_text(2e12), count_text(257)
    ('1.85 M', '2.00 T', '257')
    """
    return _scaled(number, _COUNTS, 2) or f"{number:.0f}"


def _scaled(number: float, units: Sequence[tuple[str, float]], digits: int) -> str | None:
    found = ((unit, size) for unit, size in units if abs(number) >= size)
    unit, size = next(found, ("", 0.0))
    return f"{number / size:.{digits}f} {unit}" if unit else None
