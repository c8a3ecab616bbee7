"""Attention with heads, or slices of every head, sharded over devices."""

from jaxptd.layers.attention.cross import CrossAttention, Encoded, Source
from jaxptd.layers.attention.itself import Cache, SelfAttention
from jaxptd.layers.attention.kernels import choose_kernel
from jaxptd.layers.attention.relative import RelativeBias

__all__ = [
    "Cache",
    "CrossAttention",
    "Encoded",
    "RelativeBias",
    "SelfAttention",
    "Source",
    "choose_kernel",
]
