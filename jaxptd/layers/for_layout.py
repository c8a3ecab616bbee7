"""Chooses the tensor parallelism of a layout: 1D over tp, or 2D on a row x col grid."""

import dataclasses
from collections.abc import Callable

from jaxptd import collectives
from jaxptd.attention.attend import Ring
from jaxptd.layers.grid import DecodeGrid2D, Grid2D
from jaxptd.layers.megatron import Base1D, CollectiveMatmul1D, TensorParallel1D
from jaxptd.layers.tensor_parallel import NATIVE, MatmulPrecision, ShardingAxes, TensorParallel
from jaxptd.matmul.grid import Grid
from jaxptd.mesh import Axis, Layout


def make_tensor_parallel(
    layout: Layout,
    *,
    precision: MatmulPrecision = NATIVE,
    whole: Callable[..., TensorParallel1D] = TensorParallel1D,
) -> TensorParallel:
    """The tensor parallelism of a layout in training.

    Args:
        layout: the run's.
        precision: how a layer's matrices multiply.
        whole: selects whole matmuls after a collective, without overlap.
    """
    if layout.has_grid:
        return _on_grid(layout, precision)
    return _on_tp(layout, precision, whole)


def _on_grid(layout: Layout, precision: MatmulPrecision) -> TensorParallel:
    heads = layout.attention2d == "heads"
    axes = ShardingAxes.of(layout)
    # With a slice of every head over col, attention is matmuls on the grid, not a ring over row.
    ring = Ring((Axis.CP, Axis.ROW) if heads else (Axis.CP,), layout.ring)
    grid = Grid(layout.matmul2d, layout.matmul2d_slices)
    return Grid2D(axes, ring, layout.row, layout.col, grid, precision.block_matmul)


def _on_tp(
    layout: Layout, precision: MatmulPrecision, whole: Callable[..., TensorParallel1D]
) -> TensorParallel:
    heads = Axis.ULYSSES if layout.ulysses > 1 else None
    latents = layout.exchanges_latents, layout.absorbs_latents
    ring = Ring((Axis.CP,), layout.ring, heads, *latents)
    gather_input, reduce_output = collectives.copy_to, collectives.reduce_from
    if layout.sequence_parallel:
        gather_input, reduce_output = collectives.all_gather, collectives.reduce_scatter
    axes = ShardingAxes.of(layout)
    if layout.collective_matmul:
        block_matmul = precision.block_matmul
        return CollectiveMatmul1D(
            axes, ring, layout.tp, gather_input, reduce_output, block_matmul=block_matmul
        )
    return whole(axes, ring, layout.tp, gather_input, reduce_output, precision=precision)


def for_decoding(layout: Layout) -> TensorParallel:
    """The tensor parallelism for generation: parameters sharded as in training, tokens not."""
    tensor_parallel = make_tensor_parallel(
        dataclasses.replace(layout, sequence_parallel=False, collective_matmul=False)
    )
    if isinstance(tensor_parallel, Base1D):
        return dataclasses.replace(tensor_parallel, samples_are_sharded=False)
    assert isinstance(tensor_parallel, Grid2D)
    axes = dataclasses.replace(tensor_parallel.axes, tokens=(), logit_tokens=())
    return DecodeGrid2D(
        axes, tensor_parallel.ring, tensor_parallel.rows, tensor_parallel.cols, tensor_parallel.grid
    )
