"""What a pipeline's training step moves between its stages, by formula; see `formulas.py`.

Letters: p stages, b sequences of a micro-batch on one device, T, D of an activation.
"""

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from jaxptd.analysis.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.config import Config
from jaxptd.matmul.grid import padded
from jaxptd.mesh import Axis
from jaxptd.params import ParamInfo
from jaxptd.pipeline.plan import Plan


def between_stages(
    config: Config, infos: Mapping[str, ParamInfo], plan: Plan
) -> Iterator[Collective]:
    """Activations and gradients, b*T*D in blocks, at each hop of the plan; and what is no layer.

    That is gathered whole before the first tick, and its gradients are brought home after the last.
    """
    layout, train = config.layout, config.train
    hops = sum(int(taken.sum()) for taken in plan.hops.taken.values())
    tokens = train.global_batch_size // (layout.dp * train.micro_batches) * config.model.seq_length
    hidden = config.model.hidden_size
    if layout.has_grid:
        hidden = padded(hidden, (layout.row, layout.col, layout.matmul2d_slices))
    cut = layout.cp * layout.row * layout.col * (layout.tp if layout.sequence_parallel else 1)
    size = tokens * hidden // cut * jnp.dtype(config.model.dtype).itemsize
    yield Collective(PERMUTE, (Axis.PP,), hops, hops * size)
    wide = jnp.promote_types(config.model.dtype, jnp.float32).itemsize
    for info in infos.values():
        if Axis.PP in info.axes and not info.stacked:
            devices = math.prod(layout.sizes[Axis(axis)] for axis in info.axes)
            whole = math.prod(info.held) // devices * layout.pp * wide
            yield Collective(ALL_GATHER, (Axis.PP,), 1, whole)
            yield Collective(REDUCE_SCATTER, (Axis.PP,), 1, whole)
