"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices."""

from jaxptd.zero.zero import (
    StepParams,
    Zero,
    gathered,
    reduce_scattered,
    regathered,
    shards_of,
    with_gathering,
    with_shards,
)

__all__ = [
    "StepParams",
    "Zero",
    "gathered",
    "reduce_scattered",
    "regathered",
    "shards_of",
    "with_gathering",
    "with_shards",
]
