"""The mesh of devices, and the rank groups that share its axes.

`python -m jaxptd.mesh --world-size 16 --tp 2 --pp 4` prints them.

Source: Narayanan et al., arXiv 2104.04473; Megatron-LM's `parallel_state`.
"""

import dataclasses
import math
import runpy
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxptd.context_parallel import RingKind
from jaxptd.display import preformatted
from jaxptd.errors import UserError, quoted
from jaxptd.fields import checked
from jaxptd.layout import (
    BATCH_AXES,
    SAMPLE_AXES,
    SCHEDULES,
    SEQUENCE_AXES,
    SQUARE,
    ZERO_AXES,
    Axis,
    Layout,
    Matmul2D,
    check_node,
)
from jaxptd.topology import network_order, split_groups, spread

__all__ = [
    "BATCH_AXES",
    "SAMPLE_AXES",
    "SCHEDULES",
    "SEQUENCE_AXES",
    "SQUARE",
    "ZERO_AXES",
    "Axis",
    "Layout",
    "Matmul2D",
    "MeshDescription",
    "RingKind",
    "describe_mesh",
    "draw",
    "draw_links",
    "make_mesh",
    "nodes_of",
    "on_gpus",
    "rank_groups",
    "ranks_along",
]

Groups = list[list[int]]


@checked("jaxptd.make_mesh")
def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arranges the first `layout.num_devices` of `devices` in a mesh.

    JAX's devices, the default, are in `network_order`: the innermost axes get those that NVLink
    joins. Others stay in the order in which they are passed.

    >>> make_mesh(Layout(dp=2, tp=4)).devices.shape
    (1, 1, 2, 1, 1, 1, 1, 1, 4)

    Raises:
        UserError: there are fewer devices than the layout needs.
    """
    devices = network_order(jax.devices()) if devices is None else devices
    needed = layout.num_devices
    if needed > len(devices):
        raise UserError(
            f"layout ({layout}) needs {needed} devices, there are {len(devices)}; "
            f"use smaller axes, or call jaxptd.simulate({needed}) before anything uses JAX"
        )
    block = np.array(devices[:needed], dtype=object).reshape(tuple(layout.sizes.values()))
    return Mesh(block, tuple(layout.sizes), axis_types=(AxisType.Auto,) * len(Axis))


def jax_option(name: str) -> Any:
    """The value of a JAX option; JAX 0.10.2 does not declare options to type checkers."""
    return getattr(jax.config, name)


def on_gpus(mesh: Mesh) -> bool:
    """True for a mesh of GPUs, whether present or only compiled for."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def ranks_along(layout: Layout, *axes: Axis) -> Groups:
    """The groups of ranks that differ along `axes` only, each ascending, ordered by first rank."""
    order = list(layout.sizes)
    ranks = np.arange(layout.num_devices).reshape(tuple(layout.sizes.values()))
    inside = [order.index(axis) for axis in Axis if axis in axes]
    outside = [i for i in range(len(order)) if i not in inside]
    size = math.prod(layout.sizes[axis] for axis in axes)
    return ranks.transpose(outside + inside).reshape(-1, size).tolist()


@checked("jaxptd.rank_groups")
def rank_groups(layout: Layout, *, split_rank: int | None = None) -> dict[str, Groups]:
    """Lists the devices of every process group of a layout, under Megatron's names.

    >>> rank_groups(Layout(dp=2, tp=2))["dp"]
    [[0, 2], [1, 3]]
    >>> rank_groups(Layout(pp=4), split_rank=2)["embedding"]
    [[0, 2, 3]]

    `model` lists the devices of one replica, `embedding` the first and last stage of each pipeline,
    which share tied weights, and `position_embedding` the first stage. A decoder's first stage also
    embeds, and is in both. Megatron's data-parallel devices are ours along `replicas`, `dp` and
    `ep`, and its context-parallel ones ours along `cp` and `ulysses`; the devices of
    `dp_modulo_ep` share the same experts, and sum their gradients.

    Args:
        layout: the layout to list.
        split_rank: for an encoder and a decoder on separate stages, the decoder's first stage, as
            in Megatron's --pipeline-model-parallel-split-rank. Adds the groups `encoder` and
            `decoder`, with their stages of each pipeline.

    Raises:
        UserError: there are too many devices, or split_rank leaves one side without a stage.
    """
    _check_size(layout)
    if split_rank is not None:
        _check_split(split_rank, layout)
    pipelines = ranks_along(layout, Axis.PP)
    first_stages = {0, split_rank or 0}
    groups = {
        "tp": ranks_along(layout, Axis.TP),
        "cp": ranks_along(layout, *SEQUENCE_AXES),
        "dp": ranks_along(layout, *SAMPLE_AXES),
        "pp": pipelines,
        "dp_cp": ranks_along(layout, *BATCH_AXES),
        "ep": ranks_along(layout, Axis.EP),
        "tp_dp": ranks_along(layout, *SAMPLE_AXES, Axis.TP),
        "tp_ep": ranks_along(layout, Axis.EP, Axis.TP),
        "dp_modulo_ep": ranks_along(layout, Axis.REPLICAS, Axis.DP, *SEQUENCE_AXES),
        "replicas": ranks_along(layout, Axis.REPLICAS),
        "ulysses": ranks_along(layout, Axis.ULYSSES),
        "row": ranks_along(layout, Axis.ROW),
        "col": ranks_along(layout, Axis.COL),
        "model": ranks_along(layout, Axis.PP, Axis.ROW, Axis.COL, Axis.TP),
        "embedding": _stages(pipelines, {*first_stages, layout.pp - 1}),
        "position_embedding": _stages(pipelines, first_stages),
    }
    if split_rank is None:
        return groups
    parts = {"encoder": range(split_rank), "decoder": range(split_rank, layout.pp)}
    return groups | {name: _stages(pipelines, stages) for name, stages in parts.items()}


def _stages(pipelines: Groups, stages: Iterable[int]) -> Groups:
    """The ranks of some stages of each pipeline."""
    return [[ranks[stage] for stage in sorted(stages)] for ranks in pipelines]


def _check_split(split_rank: int, layout: Layout) -> None:
    if not 0 < split_rank < layout.pp:
        remedy = f"use 1 to {layout.pp - 1}" if layout.pp > 1 else "use layout.pp of 2 or more"
        raise UserError(
            f"split rank {split_rank}: the decoder's first stage must follow an encoder stage, and "
            f"layout.pp={layout.pp}; {remedy}"
        )


# Groups and drawings take memory for every rank, about a gigabyte at this many.
MAX_WORLD_SIZE = 2**20


def _check_size(layout: Layout) -> None:
    if layout.num_devices > MAX_WORLD_SIZE:
        raise UserError(f"world size {layout.num_devices}: use 1 to {MAX_WORLD_SIZE} devices")


@dataclasses.dataclass(frozen=True, repr=False)
class MeshDescription:
    """The devices of a layout, drawn as text: `describe_mesh` makes it."""

    layout: Layout

    def __repr__(self) -> str:
        return f"{self.layout.num_devices} devices: {self.layout}\n{draw(self.layout)}"

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


@checked("jaxptd.describe_mesh")
def describe_mesh(mesh: Layout | Mesh) -> MeshDescription:
    """Draws as text where each device sits in a layout, or in a mesh made by `make_mesh`.

    >>> describe_mesh(Layout(dp=2, tp=2))
    4 devices: dp=2 tp=2
                pp 0
              +------+
    dp 0 cp 0 | 0 1  |
    dp 1 cp 0 | 2 3  |
              +------+
              in each box: tp 2

    Raises:
        UserError: the mesh has other axes, or too many devices.
    """
    layout = mesh if isinstance(mesh, Layout) else _layout_of_mesh(mesh)
    _check_size(layout)
    return MeshDescription(layout)


def _layout_of_mesh(mesh: Mesh) -> Layout:
    """The sizes of a mesh. Raises UserError if it has an axis that no layout has."""
    if unknown := [str(name) for name in mesh.shape if name not in [*Axis]]:
        raise UserError(
            f"the mesh has axis {quoted(unknown[0])}, but a layout has only {', '.join(Axis)}; "
            "use jaxptd.make_mesh(layout)"
        )
    return Layout(**{str(name): size for name, size in mesh.shape.items()})


def nodes_of(layout: Layout, node: int) -> Groups:
    """The ranks of each node, which has `node` devices that NVLink joins.

    Raises:
        UserError: `node` is not positive.
    """
    check_node(node)
    ranks = range(layout.num_devices)
    return [[*ranks[begin : begin + node]] for begin in ranks[::node]]


def draw_links(layout: Layout, node: int) -> str:
    """Lists as text which axes stay in a node of `node` devices, and what the others use.

    >>> print(draw_links(Layout(pp=2, dp=2, tp=4), 4))
    in nodes of 4 devices:
    tp 4  neighbours      inside a node, by NVLink
    dp 2  4 ranks apart   over 2 nodes, by 1 network card of each
    pp 2  8 ranks apart   over 2 nodes, by 1 network card of each

    Raises:
        UserError: `node` is not positive.
    """
    check_node(node)
    domains = [rank // node for rank in range(layout.num_devices)]
    rows = []
    for axis, (members, stride, nodes, _, rails) in spread(layout, domains).items():
        apart = "neighbours" if stride == 1 else f"{stride} ranks apart"
        cards = f"by {rails} network card{'s' if rails > 1 else ''} of each"
        link = "inside a node, by NVLink" if nodes == 1 else f"over {nodes} nodes, {cards}"
        rows.append((f"{axis} {members}", apart, link))
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}   {link}" for a, b, link in rows]
    said = [f"note: {sentence}" for sentence in split_groups(layout, domains)]
    return "\n".join([f"in nodes of {node} devices:", *lines, *said])


def draw(layout: Layout) -> str:
    """Draws a mesh as text: a column per stage, a line per dp and cp index, tp ranks in a box.

    The lines also have the index along replicas, ep and ulysses, if these are more than 1.
    """
    rare = {axis for axis in (Axis.REPLICAS, Axis.EP, Axis.ULYSSES) if layout.sizes[axis] == 1}
    pp, shown = layout.pp, [axis for axis in BATCH_AXES if axis not in rare]
    sizes = [layout.sizes[axis] for axis in shown]
    digits = len(str(layout.num_devices - 1))
    ranks = np.arange(layout.num_devices).reshape(pp, math.prod(sizes), -1)
    widths = [len(str(size - 1)) for size in sizes]
    labels = [
        "".join(f"{a} {i:>{w}} " for a, i, w in zip(shown, index, widths, strict=True))
        for index in np.ndindex(*sizes)
    ]
    rows = [
        [" ".join(f"{rank:>{digits}}" for rank in box) for box in line]
        for line in ranks.swapaxes(0, 1)
    ]
    cell = max(len(rows[0][0]), len(f"pp {pp - 1}"))
    margin = " " * len(labels[0])
    title = margin + " ".join(f"  {f'pp {stage}':<{cell}}" for stage in range(pp)).rstrip()
    rule = margin + ("+" + "-" * (cell + 2)) * pp + "+"
    body = [
        label + "".join(f"| {text:<{cell}} " for text in row) + "|"
        for label, row in zip(labels, rows, strict=True)
    ]
    across = f"row {layout.row} x col {layout.col}" if layout.has_grid else f"tp {layout.tp}"
    return "\n".join([title, rule, *body, rule, f"{margin}in each box: {across}"])


if __name__ == "__main__":  # `python -m jaxptd.mesh`, the command `jaxptd mesh`
    runpy.run_module("jaxptd.commands.mesh", run_name="__main__")
