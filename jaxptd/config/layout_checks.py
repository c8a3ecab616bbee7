"""Checks that a layout divides a model's sizes and supports its options."""

import math

from jaxptd.config.checks import require_divides
from jaxptd.config.model import ModelConfig
from jaxptd.errors import UserError
from jaxptd.layout import Axis, Layout


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises UserError if the model cannot run with the layout."""
    _check_products(model, layout)
    _check_sequence("seq_length", model.seq_length, layout)
    _check_sequence("decoder_seq_length", model.target_length, layout)
    if model.block.positions == "learned":
        require_divides("model.max_positions", model.num_positions, *_product(layout, Axis.ROW))
    if layout.unfused_attention and model.attention == "cudnn":
        raise UserError(
            f"{layout.unfused_attention} has no fused attention kernel; use model.attention=xla"
        )
    _check_offload(model, layout)


def _check_products(model: ModelConfig, layout: Layout) -> None:
    if model.products == "fp8" and layout.has_grid:
        raise UserError(
            f"model.products=fp8 with layout.row={layout.row}, layout.col={layout.col}: products "
            "on a grid are native; use layout.tp, or model.products=native"
        )
    if model.products == "fp8" and layout.collective_matmul:
        raise UserError(
            "model.products=fp8 with layout.collective_matmul=true: products in ring steps are "
            "native; use layout.collective_matmul=false, or model.products=native"
        )


def _check_offload(model: ModelConfig, layout: Layout) -> None:
    nothing_kept = model.remat != "dots" or model.remat_layers == 0
    if layout.offload == "activations" and (nothing_kept or layout.pp > 1):
        layers = "" if model.remat_layers is None else f", model.remat_layers={model.remat_layers}"
        raise UserError(
            f"layout.offload=activations with model.remat={model.remat}{layers}, "
            f"layout.pp={layout.pp}: it offloads what model.remat=dots keeps, without a pipeline; "
            "use model.remat=dots and layout.pp=1"
        )


def _check_sequence(name: str, length: int, layout: Layout) -> None:
    """Raises UserError if a sequence of `length` does not split over the axes that shard it."""
    heads = layout.attention2d == "heads"
    ring, devices = _product(layout, Axis.CP, *((Axis.ROW,) if heads else ()))
    if devices > 1 and layout.ring == "zigzag" and length % (2 * devices):
        other = "" if length % devices else ", or layout.ring=blockwise"
        raise UserError(
            f"model.{name}={length} does not split into two chunks for each of "
            f"{ring}={devices}, as layout.ring=zigzag needs; use a multiple of {2 * devices}{other}"
        )
    inner = Axis.TP if layout.sequence_parallel else Axis.ROW
    unit = math.lcm(layout.row, layout.col) * layout.matmul2d_slices * layout.cp
    if not heads and layout.has_grid and length % unit:
        raise UserError(
            f"model.{name}={length} does not split into panels of a grid of layout.row="
            f"{layout.row} x layout.col={layout.col}, layout.matmul2d_slices="
            f"{layout.matmul2d_slices}, layout.cp={layout.cp}, as layout.attention2d=blocks needs; "
            f"use a multiple of {unit}, or layout.attention2d=heads"
        )
    for axes in ((Axis.CP,), (Axis.CP, inner)):
        require_divides(f"model.{name}", length, *_product(layout, *axes))


def _product(layout: Layout, *axes: Axis) -> tuple[str, int]:
    """Name of the product of several axes, for a message, and its number of devices."""
    used = [axis for axis in axes if layout.sizes[axis] > 1]
    return " x ".join(f"layout.{axis}" for axis in used), math.prod(layout.sizes[a] for a in used)
