"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices."""

from jaxptd.zero.zero import (
    Lendings,
    Zero,
    borrowing,
    fetched,
    fetched_again,
    parts_of,
    sent_home,
    with_parts,
)

__all__ = [
    "Lendings",
    "Zero",
    "borrowing",
    "fetched",
    "fetched_again",
    "parts_of",
    "sent_home",
    "with_parts",
]
