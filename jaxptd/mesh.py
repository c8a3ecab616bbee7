"""The mesh of devices: who shares an axis with whom.

`python -m jaxptd.mesh --world-size 16 --tp 2 --pp 4` prints the rank groups.

Source: Narayanan et al., arXiv 2104.04473; Megatron-LM's `parallel_state`.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxptd.display import preformatted
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.layout import BATCH_AXES, SCHEDULES, SQUARE, Axis, Layout, Matmul2D, RingKind

__all__ = [
    "BATCH_AXES",
    "SCHEDULES",
    "SQUARE",
    "Axis",
    "Layout",
    "Matmul2D",
    "MeshDescription",
    "RingKind",
    "describe_mesh",
    "draw",
    "in_process_order",
    "make_mesh",
    "on_gpus",
    "rank_groups",
    "ranks_along",
]

Groups = list[list[int]]


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges the first `layout.num_devices` of `devices` (default: JAX's) in a mesh.

    >>> make_mesh(Layout(dp=2, tp=4)).devices.shape
    (1, 2, 1, 1, 1, 4)

    Raises:
        UserError: there are fewer devices than the layout needs.
    """
    devices = in_process_order(jax.devices()) if devices is None else devices
    needed = layout.num_devices
    if needed > len(devices):
        raise UserError(
            f"layout ({layout}) needs {needed} devices, there are {len(devices)}; "
            f"use smaller axes, or call jaxptd.simulate({needed}) before anything uses JAX"
        )
    block = np.array(devices[:needed], dtype=object).reshape(tuple(layout.sizes.values()))
    return Mesh(block, tuple(layout.sizes), axis_types=(AxisType.Auto,) * len(Axis))


def in_process_order(devices: Sequence[Any]) -> list[Any]:
    """Sorts devices by their process, so that the fastest axes stay within a process."""
    return sorted(devices, key=lambda device: device.process_index)  # stable: keeps JAX's order


def on_gpus(mesh: Mesh) -> bool:
    """True for a mesh of GPUs, present or only compiled for."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def ranks_along(layout: Layout, *axes: Axis) -> Groups:
    """The groups of ranks that differ along `axes` only, each ascending, ordered by first rank."""
    order = list(layout.sizes)
    ranks = np.arange(layout.num_devices).reshape(tuple(layout.sizes.values()))
    inside = [order.index(axis) for axis in Axis if axis in axes]
    outside = [i for i in range(len(order)) if i not in inside]
    size = math.prod(layout.sizes[axis] for axis in axes)
    return ranks.transpose(outside + inside).reshape(-1, size).tolist()


def rank_groups(layout: Layout) -> dict[str, Groups]:
    """Every process group of the layout, by name.

    `model` is the devices of one replica; `embedding` the first and last stage of each pipeline,
    which share tied weights; `position_embedding` the first stage.
    """
    pipelines = ranks_along(layout, Axis.PP)
    return {
        "tp": ranks_along(layout, Axis.TP),
        "cp": ranks_along(layout, Axis.CP),
        "dp": ranks_along(layout, Axis.DP),
        "pp": pipelines,
        "dp_cp": ranks_along(layout, Axis.DP, Axis.CP),
        "row": ranks_along(layout, Axis.ROW),
        "col": ranks_along(layout, Axis.COL),
        "model": ranks_along(layout, Axis.PP, Axis.ROW, Axis.COL, Axis.TP),
        "embedding": [sorted({stages[0], stages[-1]}) for stages in pipelines],
        "position_embedding": [[stages[0]] for stages in pipelines],
    }


# Printing every group takes memory for every rank: about a gigabyte at this many.
MAX_WORLD_SIZE = 2**20


def _layout_of(world_size: int, sizes: dict[str, int | None]) -> Layout:
    """A layout of so many devices: unless dp is given, the quotient of the other sizes."""
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    layout = Layout(**given)
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UserError(f"world size {world_size}: use 1 to {MAX_WORLD_SIZE} devices")
    rest, remainder = divmod(world_size, layout.num_devices)
    if "dp" not in given and remainder == 0:
        return dataclasses.replace(layout, dp=rest)
    if world_size != layout.num_devices:
        product = " x ".join(f"{name}={size}" for name, size in given.items())
        remedy = f"use a multiple of {layout.num_devices}, or other sizes"
        if "dp" in given:
            remedy = f"use world size {layout.num_devices}, or leave --dp out"
        raise UserError(f"world size {world_size} does not split into {product}; {remedy}")
    return layout


@dataclasses.dataclass(frozen=True, repr=False)
class MeshDescription:
    """The devices of a layout, drawn as text: `describe_mesh` makes it."""

    layout: Layout

    def __repr__(self) -> str:
        return f"{self.layout.num_devices} devices: {self.layout}\n{draw(self.layout)}"

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


def describe_mesh(mesh: Layout | Mesh) -> MeshDescription:
    """Shows which devices a layout, or a mesh that `make_mesh` made, puts where.

    >>> describe_mesh(Layout(dp=2, tp=2))
    4 devices: dp=2 tp=2
                pp 0
              +------+
    dp 0 cp 0 | 0 1  |
    dp 1 cp 0 | 2 3  |
              +------+
              in each box: tp 2
    """
    sizes = {} if isinstance(mesh, Layout) else {str(k): n for k, n in mesh.shape.items()}
    return MeshDescription(mesh if isinstance(mesh, Layout) else Layout(**sizes))


def draw(layout: Layout) -> str:
    """Draws a mesh as text: a column per stage, a line per dp and cp index, tp ranks in a box."""
    pp, dp, cp = layout.pp, layout.dp, layout.cp
    digits = len(str(layout.num_devices - 1))
    ranks = np.arange(layout.num_devices).reshape(pp, dp * cp, -1)
    d_width, c_width = len(str(dp - 1)), len(str(cp - 1))
    labels = [f"dp {d:>{d_width}} cp {c:>{c_width}} " for d, c in np.ndindex(dp, cp)]
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


def _text(layout: Layout) -> str:
    lines = [f"{layout.num_devices} devices: {layout}", "", draw(layout), ""]
    for name, groups in rank_groups(layout).items():
        lines.append(f"{name}: " + " ".join(f"[{','.join(map(str, group))}]" for group in groups))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rank groups of a world, as text or JSON."""
    parser = Parser(prog="python -m jaxptd.mesh", description=main.__doc__)
    parser.add_argument("--world-size", type=int, required=True, help="number of devices")
    for axis in Axis:
        text = "default: what the other sizes leave" if axis is Axis.DP else "default: 1"
        parser.add_argument(f"--{axis}", type=int, help=text)
    parser.add_argument("--json", action="store_true", help="print the groups as JSON")
    args = vars(parser.parse_args(argv))
    world_size, as_json = args.pop("world_size"), args.pop("json")
    layout = _layout_of(world_size, args)
    print(json.dumps(rank_groups(layout)) if as_json else _text(layout))


if __name__ == "__main__":
    run_command(main)
