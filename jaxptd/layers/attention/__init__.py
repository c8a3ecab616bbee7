"""Attention with heads, or slices of every head, sharded over devices."""

from jaxptd.layers.attention.cross import CrossAttention, Encoded, Source
from jaxptd.layers.attention.heads import RelativeBias, choose_kernel
from jaxptd.layers.attention.latent import LatentAttention
from jaxptd.layers.attention.self_attention import Cache, SelfAttention

__all__ = [
    "Cache",
    "CrossAttention",
    "Encoded",
    "LatentAttention",
    "RelativeBias",
    "SelfAttention",
    "Source",
    "choose_kernel",
]
