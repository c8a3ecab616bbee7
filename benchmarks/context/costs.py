"""Ways to shard one sequence, and what a layer then moves: closed forms, checked with jaxprs.

Letters: B batch, T tokens, D model, n devices.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889; Korthikanti et al., arXiv
2205.05198; Llama Team, arXiv 2407.21783, section 3.3.2 (all-gathered keys and values).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jaxptd.analysis.count import collectives_of, per_layer
from jaxptd.analysis.hardware import PEAK_FLOPS
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    subtract,
)
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

PEAK = PEAK_FLOPS["H200"]
# Bytes/s of a link, one direction.
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gb/s InfiniBand, 50 GB/s": 50e9}
Pass = Literal["forward", "backward"]

# ---- the plans ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to shard one sequence over n devices."""

    name: str
    layout: Layout

    def program(self, model: ModelConfig, *, batch: int = 1) -> Program:
        train = TrainConfig(global_batch_size=batch, platform="cpu")
        return Program(Config(model, self.layout, train=train), make_mesh(self.layout))


def plans(n: int) -> list[Plan]:
    """The plans that are compared, over n devices."""
    tensor = Layout(tp=n, sequence_parallel=True)
    return [
        Plan("ring, zigzag", Layout(cp=n)),
        Plan("ring, blockwise", Layout(cp=n, ring="blockwise")),
        Plan("ring, rsa", Layout(cp=n, ring="rsa")),
        Plan("gather", Layout(cp=n, ring="gather")),
        Plan("tp, sequence parallel", tensor),
        Plan("tp, keep_gathered", dataclasses.replace(tensor, keep_gathered=True)),
    ]


# ---- what they move -----------------------------------------------------------------------------


def moves(plan: Plan, model: ModelConfig, batch: int) -> dict[Pass, list[Collective]]:
    """The collectives of one layer's activations when it saves all of them (`remat: none`)."""
    layout = plan.layout
    elements = batch * model.seq_length * model.hidden_size
    size = elements * jnp.dtype(model.dtype).itemsize
    wide = elements * jnp.promote_types(model.dtype, jnp.float32).itemsize
    if layout.tp > 1:
        times = 2 if layout.keep_gathered else 4
        gathers, more = (Collective(ALL_GATHER, ("tp",), n, n * size) for n in (2, times))
        scatters = Collective(REDUCE_SCATTER, ("tp",), 2, 2 * size)
        return {"forward": [gathers, scatters], "backward": [more, scatters]}
    if layout.ring == "gather":
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
    """Bytes of one hop per local token and unit of D: bfloat16 k and v, float32 dk and dv."""
    return 2 * 2 + (2 * 4 if which == "backward" else 0)


def visit_flops(which: Pass, ring: str) -> int:
    """FLOPs of the matmuls of one visit on the slowest device, divided by (T/n)^2 D.

    Two matmuls in forward, five in backward, 2 (T/n)^2 D each; a zigzag needs half of each block.
    """
    return (4 if which == "forward" else 10) // (2 if ring == "zigzag" else 1)


def tokens_to_hide(which: Pass, ring: str, *, link: float, efficiency: float) -> float:
    """The T/n at which a visit takes as long as a hop at full link speed."""
    return hop_bytes(which) / visit_flops(which, ring) * efficiency * PEAK / link


def count(plan: Plan, model: ModelConfig, batch: int) -> dict[Pass, list[Collective]]:
    """Counts what one layer's activations move in the jaxprs of the training and evaluation steps.

    Raises:
        ValueError: the count differs from `moves`.
    """
    both = [each for each in per_layer(plan.program(model, batch=batch)) if each.count]
    forward = _forward(plan, model, batch)
    found: dict[Pass, list[Collective]] = {"forward": forward, "backward": subtract(both, forward)}
    for which, expected in moves(plan, model, batch).items():
        if subtract(found[which], expected):
            raise ValueError(f"{plan.name}, {which}: {found[which]}, by formula {expected}")
    return found


def _forward(plan: Plan, model: ModelConfig, batch: int) -> list[Collective]:
    deeper = dataclasses.replace(model, num_layers=model.num_layers + 1)
    found = []
    for program in (plan.program(deeper, batch=batch), plan.program(model, batch=batch)):
        step: Any = program.eval_step
        traced = step.trace(program.abstract_state["params"], program.abstract_batch)
        found.append(collectives_of(traced.jaxpr, program.mesh))
    return subtract(*found)
