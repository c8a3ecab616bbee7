"""ZeRO: parameters, gradients and optimizer state sharded over data parallel devices."""

from jaxptd.zero.gathering import (
    gathered,
    reduce_scattered,
    regathered,
    shards_of,
    with_gathering,
    with_shards,
)
from jaxptd.zero.zero import StepParams, Zero

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
