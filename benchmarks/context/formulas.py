"""Closed forms for the bytes that a layer moves, and for when a hop takes as long as attention.

Letters: B batch, T query, D model, n devices.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889; Korthikanti et al., arXiv
2205.05198.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from benchmarks.context.plans import Plan
from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.analysis.hardware import PEAK_FLOPS
from jaxptd.config import ModelConfig

PEAK = PEAK_FLOPS["H200"]
# Bytes/s of a link, one direction.
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gb/s InfiniBand, 50 GB/s": 50e9}
Pass = Literal["forward", "backward"]


def moves(plan: Plan, model: ModelConfig, batch: int) -> dict[Pass, list[Collective]]:
    """The collectives of one layer's activations, with everything kept (`model.remat: none`)."""
    layout = plan.layout
    elements = batch * model.seq_length * model.hidden_size
    size = elements * jnp.dtype(model.dtype).itemsize
    wide = elements * jnp.promote_types(model.dtype, jnp.float32).itemsize
    if layout.tp > 1:
        times = 2 if layout.keep_gathered else 4
        gathers, more = (Collective(ALL_GATHER, ("tp",), n, n * size) for n in (2, times))
        scatters = Collective(REDUCE_SCATTER, ("tp",), 2, 2 * size)
        return {"forward": [gathers, scatters], "backward": [more, scatters]}
    if plan.gathered:
        gather = Collective(ALL_GATHER, ("cp",), 1, 2 * size)
        scatter = Collective(REDUCE_SCATTER, ("cp",), 1, 2 * wide)
        return {"forward": [gather], "backward": [gather, scatter]}
    hops = layout.cp - 1
    rings = 2 if layout.ring == "rsa" else 1  # k and v separately, or both in one permute
    there = Collective(PERMUTE, ("cp",), rings * hops, 2 * size * hops // layout.cp)
    again = Collective(PERMUTE, ("cp",), 2 * rings * hops, 2 * (size + wide) * hops // layout.cp)
    return {"forward": [there], "backward": [again]}


def messages(found: Sequence[Collective], n: int) -> int:
    """Consecutive sends of each device, if every collective runs as a ring."""
    steps = {PERMUTE: 1, ALL_REDUCE: 2 * (n - 1)}
    return sum(each.count * steps.get(each.kind, n - 1) for each in found)


def hop_bytes(which: Pass) -> int:
    """Bytes of one hop per token of a device and unit of D: bfloat16 k, v; float32 dk, dv."""
    return 2 * 2 + (2 * 4 if which == "backward" else 0)


def visit_flops(which: Pass, ring: str) -> int:
    """FLOPs of the products of one visit on the slowest device, divided by (T/n)^2 D.

    Two products forward, five backward, 2 (T/n)^2 D each; a zigzag needs half of each block.
    """
    return (4 if which == "forward" else 10) // (2 if ring == "zigzag" else 1)


def tokens_to_hide(which: Pass, ring: str, *, link: float, efficiency: float) -> float:
    """T/n from which a visit takes as long as a hop, at full link speed."""
    return hop_bytes(which) / visit_flops(which, ring) * efficiency * PEAK / link
