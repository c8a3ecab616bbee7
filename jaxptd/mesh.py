"""The mesh: its axes, how many devices lie along each, and who talks to whom.

The only place that spells an axis. Axes from the slowest link to the fastest, in Megatron's rank
order (tp fastest, then cp, dp, pp): `pp, dp, cp, row, col, tp`. All are always in the mesh, most of
them with size 1. `python -m jaxptd.mesh --world-size 16 --tp 2 --pp 4` prints the rank groups.

Source: Narayanan et al., arXiv 2104.04473; Megatron-LM's `parallel_state`.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh_drawing import draw


class Axis(StrEnum):
    """A mesh axis. Their order here is the order in the mesh, slowest link first."""

    PP = "pp"  # pipeline stages
    DP = "dp"  # data parallel: the batch is cut
    CP = "cp"  # context parallel: the sequence is cut, attention goes round a ring
    ROW = "row"  # 2D tensor parallel grid
    COL = "col"
    TP = "tp"  # Megatron tensor parallel: weight matrices are cut one way


BATCH_AXES = (Axis.DP, Axis.CP)  # they cut the tokens of a batch; ZeRO cuts the state over them
RingKind = Literal["zigzag", "blockwise", "rsa"]
Matmul2D = Literal["gather", "summa", "fox", "cannon"]
Attention2D = Literal["heads", "blocks"]
ZeroStage = Literal[0, 1, 2, 3]
Offload = Literal["none", "optimizer", "activations"]
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v")  # or the path of a table
KNOWN = {
    "ring": get_args(RingKind),
    "matmul2d": get_args(Matmul2D),
    "attention2d": get_args(Attention2D),
    "zero": get_args(ZeroStage),
    "offload": get_args(Offload),
}
SQUARE: tuple[Matmul2D, ...] = ("fox", "cannon")  # these need as many rows as columns


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is spread over devices.

    Args:
        pp: pipeline stages.
        dp: parts the batch is cut into.
        cp: parts the sequence is cut into for ring attention.
        tp: parts each weight matrix is cut into, one way (Megatron). Either this or row x col.
        row: rows of the grid of blocks of every matrix; the sequence is cut over them too.
        col: columns of that grid; hidden units are cut over them too.
        sequence_parallel: cut the sequence over tp too, between the matrix products.
        collective_matmul: with sequence_parallel, gather and reduce-scatter in steps round a ring,
            each under a part of the product that needs them.
        ring: attention over cp (and row): zigzag (balanced), blockwise (contiguous parts), or rsa
            (whole rows of scores, as first published).
        matmul2d: products on the grid: gather, summa, or on a square grid fox or cannon.
        matmul2d_slices: parts in which gather gathers, each during the product of the one before.
        attention2d: on the grid, heads over col and a ring over row, or blocks of every head, for
            head counts that col does not divide.
        schedule: of the pipeline: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, or the path of a
            table (.csv).
        virtual_stages: parts of the model that each stage holds, where the schedule has several;
            null is the schedule's own.
        stage_layers: layers of each stage (of each part of the model in its order, where stages
            hold several); null spreads them as evenly as possible.
        zero: what is cut over dp x cp (ZeRO): 1 the state, that is parameters and optimizer, 2
            gradients too, 3 parameters during a step, too; 0 nothing.
        offload: what lies in host memory: none, optimizer (masters and moments), or activations
            (what model.remat=dots keeps).
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    row: int = 1
    col: int = 1
    sequence_parallel: bool = False
    collective_matmul: bool = False
    ring: RingKind = "zigzag"
    matmul2d: Matmul2D = "gather"
    matmul2d_slices: int = 1
    attention2d: Attention2D = "heads"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stage_layers: tuple[int, ...] | None = None
    zero: ZeroStage = 0
    offload: Offload = "none"

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise UserError(
                    f"layout.{axis}={size}: an axis has at least one device; use 1 or more"
                )
        if self.tp > 1 and self.has_grid:
            raise UserError(
                f"layout.tp={self.tp} with layout.row={self.row}, layout.col={self.col}: a matrix "
                "is held by tp or by a row x col grid, not both; set tp=1 or row=col=1"
            )
        for name, known in KNOWN.items():
            if getattr(self, name) not in known:
                raise UserError(
                    f"layout.{name}={getattr(self, name)}: use one of {', '.join(map(str, known))}"
                )
        self._check_grid()
        if self.collective_matmul and not self.sequence_parallel:
            raise UserError(
                "layout.collective_matmul=true is for layout.sequence_parallel=true; set both, or "
                "leave it false (a grid has layout.matmul2d_slices)"
            )
        if self.schedule not in SCHEDULES and not self.schedule.endswith(".csv"):
            raise UserError(
                f"layout.schedule={self.schedule}: use one of {', '.join(SCHEDULES)}, or the path "
                "of a table that ends in .csv"
            )
        if self.virtual_stages is not None and self.virtual_stages < 1:
            raise UserError(f"layout.virtual_stages={self.virtual_stages}: use 1 or more, or null")

    def _check_grid(self) -> None:
        grid = f"a grid of layout.row={self.row} x layout.col={self.col}"
        if self.matmul2d_slices < 1:
            raise UserError(f"layout.matmul2d_slices={self.matmul2d_slices}: use 1 or more")
        if self.matmul2d_slices > 1 and self.matmul2d != "gather":
            raise UserError(
                f"layout.matmul2d_slices={self.matmul2d_slices}: layout.matmul2d={self.matmul2d} "
                "has no slices; use layout.matmul2d=gather or layout.matmul2d_slices=1"
            )
        if self.matmul2d in SQUARE and self.row != self.col:
            raise UserError(
                f"{grid} is not square, as layout.matmul2d={self.matmul2d} needs it; "
                "use layout.matmul2d=gather or summa, or as many rows as columns"
            )
        if self.sequence_parallel and self.has_grid:
            raise UserError(f"{grid} shards the sequence; leave layout.sequence_parallel false")
        if self.attention2d == "blocks" and self.cp > 1 and self.has_grid:
            raise UserError(
                f"layout.attention2d=blocks has no ring (layout.cp={self.cp}); "
                "use layout.cp=1 or layout.attention2d=heads"
            )

    @property
    def sizes(self) -> dict[Axis, int]:
        """Devices along each axis, in mesh order."""
        return {axis: getattr(self, axis.value) for axis in Axis}

    @property
    def has_grid(self) -> bool:
        return self.row * self.col > 1

    @property
    def ring_size(self) -> int:
        """Devices among which the keys of a sequence travel."""
        return self.cp * (self.row if self.attention2d == "heads" else 1)

    @property
    def own_scores(self) -> str | None:
        """The choice by which attention makes its scores itself, without a kernel."""
        if self.attention2d == "blocks" and self.has_grid:
            return "layout.attention2d=blocks"
        return "layout.ring=rsa" if self.ring == "rsa" and self.ring_size > 1 else None

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        names = ("sequence_parallel", "collective_matmul")
        sequence = [name for name in names if getattr(self, name)]
        slices = f" in {self.matmul2d_slices} slices" if self.matmul2d_slices > 1 else ""
        grid = [f"{self.matmul2d}{slices}", str(self.attention2d)] if self.has_grid else []
        ring = [str(self.ring)] if self.ring_size > 1 else []
        pipeline = [self.schedule] if self.pp > 1 else []
        zero = [f"zero={self.zero}"] if self.zero else []
        offload = [f"offload={self.offload}"] if self.offload != "none" else []
        words = sizes + pipeline + sequence + ring + grid + zero + offload
        return " ".join(words) or "one device"


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `layout` over the first `layout.num_devices` of `devices` (default: JAX's).

    Raises:
        UserError: there are fewer devices than the layout needs.
    """
    devices = in_process_order(jax.devices()) if devices is None else devices
    needed = layout.num_devices
    if needed > len(devices):
        raise UserError(
            f"layout ({layout}) needs {needed} devices, there are {len(devices)}; "
            "use smaller axes, or train.platform=cpu to simulate devices"
        )
    block = np.array(devices[:needed], dtype=object).reshape(tuple(layout.sizes.values()))
    return Mesh(block, tuple(layout.sizes), axis_types=(AxisType.Auto,) * len(Axis))


def in_process_order(devices: Sequence[Any]) -> list[Any]:
    """Those of a process together, so that the fastest axes stay within it."""
    return sorted(devices, key=lambda device: device.process_index)  # stable: else as JAX has them


def on_gpus(mesh: Mesh) -> bool:
    """Whether a mesh is of GPUs, there or only compiled for."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


Groups = list[list[int]]


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

    `model` is tp x pp (the devices of one copy of the model); `embedding` the first and last stage
    of each pipeline, which share tied weights; `position_embedding` the first stage.
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
    """The layout of a world: dp is what the other sizes leave, unless it is given."""
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
