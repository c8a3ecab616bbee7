"""Chooses the form of tensor parallelism for a layout: 1D over tp, or 2D on a row x col grid."""

import dataclasses
from collections.abc import Callable

from jaxptd import collectives
from jaxptd.attention.ring import Ring
from jaxptd.layers.axes import ShardingAxes
from jaxptd.layers.form import NATIVE, Arithmetic, TensorParallel
from jaxptd.layers.grid import DecodeGrid2D, Grid2D
from jaxptd.layers.megatron import Megatron1D, RingSteps1D
from jaxptd.matmul.grid import Grid
from jaxptd.mesh import Axis, Layout


def make_form(
    layout: Layout,
    *,
    arithmetic: Arithmetic = NATIVE,
    whole: Callable[..., Megatron1D] = Megatron1D,
) -> TensorParallel:
    """The form in which a layout shards matrices for training.

    Args:
        layout: of the run.
        arithmetic: of the products of a layer's matrices.
        whole: makes the form where whole products follow a collective.
    """
    if layout.has_grid:
        return _form_2d(layout, arithmetic)
    return _form_1d(layout, arithmetic, whole)


def _form_2d(layout: Layout, arithmetic: Arithmetic) -> TensorParallel:
    heads = layout.attention2d == "heads"
    axes = ShardingAxes.of(layout)
    # With a slice of every head over col, attention is products on the grid and no ring over row.
    ring = Ring((Axis.CP, Axis.ROW) if heads else (Axis.CP,), layout.ring)
    grid = Grid(layout.matmul2d, layout.matmul2d_slices)
    return Grid2D(axes, ring, layout.row, layout.col, grid, arithmetic.dot)


def _form_1d(
    layout: Layout, arithmetic: Arithmetic, whole: Callable[..., Megatron1D]
) -> TensorParallel:
    ring = Ring((Axis.CP,), layout.ring)
    enter, leave = collectives.copy_to, collectives.reduce_from
    if layout.sequence_parallel:
        enter, leave = collectives.all_gather, collectives.reduce_scatter
    axes = ShardingAxes.of(layout)
    if layout.collective_matmul:
        return RingSteps1D(axes, ring, layout.tp, enter, leave, arithmetic.dot)
    return whole(axes, ring, layout.tp, enter, leave, arithmetic)


def for_decoding(layout: Layout) -> TensorParallel:
    """The form for generation: parameters sharded as in training, tokens not sharded."""
    form = make_form(dataclasses.replace(layout, sequence_parallel=False, collective_matmul=False))
    if not isinstance(form, Grid2D):
        return form
    axes = dataclasses.replace(form.axes, tokens=(), logit_tokens=())
    return DecodeGrid2D(axes, form.ring, form.rows, form.cols, form.grid)
