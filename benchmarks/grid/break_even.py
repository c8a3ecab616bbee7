"""Computes when a row x col grid is cheaper than 1D tensor and sequence parallelism.

`python -m benchmarks.grid.break_even [--hidden 4096]` prints the tables of docs/grid.md from closed
forms. Nothing is run or traced; benchmarks/grid/test_grid.py compares the bytes with those of a
training step.

They describe one layer of a GPT, forward and backward, in bfloat16 with `model.remat: none` and a
micro-batch of M tokens. On the grid, all-gathers run in one slice and attention is by heads.
Collectives run as rings.
Letters: M tokens, D model (F = 4 D), N devices. `row` and `col` are the mesh axes.
Source: jaxptd/analysis/traffic/; Korthikanti et al., arXiv 2205.05198.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxptd.analysis.report import table
from jaxptd.errors import Parser, run_command

HALF, WIDE = 2, 4  # bytes of an activation, and of a gradient of weights or of k and v
WIDTHS = 3 + 1 + 4 + 4  # weights of the four matmuls, over D^2
INPUTS = 1 + 1 + 1 + 4  # their inputs, over M D


@dataclasses.dataclass(frozen=True)
class Links:
    """Bytes/s that a device sends along each axis, and seconds per message; all 1: counts bytes."""

    tp: float = 1.0
    row: float = 1.0
    col: float = 1.0
    latency: float = 0.0


BYTES = Links()


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes or seconds of one layer on one device: `each` M + `fixed`."""

    each: float
    fixed: float = 0.0

    def at(self, tokens: float) -> float:
        return self.each * tokens + self.fixed

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.each + other.each, self.fixed + other.fixed)

    def __truediv__(self, speed: float) -> "Cost":
        return Cost(self.each / speed, self.fixed / speed)


def one_way(devices: int, hidden: int, links: Links = BYTES) -> Cost:
    """The cost of 1D with sequence parallelism: 4 all-gathers and 4 reduce-scatters of [M, D]."""
    sent = Cost(8 * HALF * hidden * (devices - 1) / devices)
    return sent / links.tp + Cost(0, messages_one_way(devices) * links.latency)


def along_col(rows: int, cols: int, hidden: int) -> Cost:
    """Inputs of matmuls twice, their gradients once, and eight float32 sums for two norms."""
    share = (cols - 1) / (rows * cols)
    return Cost(share * (3 * INPUTS * HALF * hidden + 2 * 8 * WIDE))


def along_row(rows: int, cols: int, hidden: int) -> Cost:
    """Weights twice, their float32 gradients once, and the ring of k, v, dk and dv."""
    share = (rows - 1) / (rows * cols)
    ring = 2 * hidden * (2 * HALF + WIDE)
    return Cost(share * ring, share * WIDTHS * hidden**2 * (2 * HALF + WIDE))


def on_grid(rows: int, cols: int, hidden: int, links: Links = BYTES) -> Cost:
    """The cost of the grid: both axes, one after the other."""
    both = along_row(rows, cols, hidden) / links.row + along_col(rows, cols, hidden) / links.col
    return both + Cost(0, messages_on_grid(rows, cols) * links.latency)


def messages_one_way(devices: int) -> int:
    """The number of consecutive sends of a device."""
    return 8 * (devices - 1)


def messages_on_grid(rows: int, cols: int) -> int:
    """Three for each matmul and axis, three rings of attention, six all-reduces of norms."""
    return (4 * 3 + 6 * 2) * (cols - 1) + (4 * 3 + 3) * (rows - 1)


def cheaper(rows: int, cols: int, hidden: int, links: Links = BYTES) -> tuple[float, float] | None:
    """The range of tokens per micro-batch in which the grid costs less; None if never."""
    grid, line = on_grid(rows, cols, hidden, links), one_way(rows * cols, hidden, links)
    saved, more = line.each - grid.each, grid.fixed - line.fixed
    if saved > 0:
        return max(0.0, more / saved), math.inf
    return (0.0, more / saved if saved else math.inf) if more < 0 else None


def first(devices: int, hidden: int, links: Links = BYTES) -> tuple[int, int, float] | None:
    """The grid that pays off with the fewest tokens, as (rows, cols, tokens); None if none does."""
    found = []
    for cols in (cols for cols in range(2, devices) if devices % cols == 0):
        span = cheaper(devices // cols, cols, hidden, links)
        if span and span[1] == math.inf:
            found.append((span[0], -cols))
    if not found:
        return None
    tokens, cols = min(found)
    return devices // -cols, -cols, tokens


def kept_one_way(devices: int, *, remat: str) -> float:
    """Bytes / (M D) that a layer saves for backward on one device, without norms' statistics.

    This is 1D with `layout.keep_gathered`, which sends the fewest bytes.
    """
    return {"none": 4 + 28 / devices, "dots": 20 / devices, "full": 2 / devices}[remat]


def kept_on_grid(devices: int, *, remat: str) -> float:
    """`kept_one_way` on a grid, where the inputs of matmuls are saved in blocks."""
    return {"none": 32 / devices, "dots": 22 / devices, "full": 2 / devices}[remat]


# ---- the tables ---------------------------------------------------------------------------------

GRIDS = ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8))
NVLINK, NETWORK, LATENCY = 450e9, 50e9, 10e-6  # bytes/s of an H200's links; seconds, assumed
NODE = 8  # GPUs, each with a link of either kind


def over_nodes(cols: int) -> Links:
    """Links for a grid with rows within a node and columns across nodes.

    The 1D ring uses all network links of a node; the rings of `cols` columns share them.
    """
    line, column = (min(NVLINK, NODE / rings * NETWORK) for rings in (1, cols))
    return Links(tp=line, row=column, col=NVLINK, latency=LATENCY)


def rows(hidden: int) -> Iterator[Sequence[str]]:
    """The table, with a row per grid: bytes and messages of 1D and grid, and the break-even."""
    sent = ("1D: bytes / (M D)", "grid: bytes / (M D)", "and / D²", "messages: 1D", "grid")
    yield "row x col", *sent, "fewer bytes", "less time, NVLink", "less time, over nodes"
    nvlink = Links(NVLINK, NVLINK, NVLINK, LATENCY)
    for rows, cols in GRIDS:
        devices, grid = rows * cols, on_grid(rows, cols, hidden)
        each = [f"{cost / hidden:.2f}" for cost in (one_way(devices, hidden).each, grid.each)]
        messages = map(str, (messages_one_way(devices), messages_on_grid(rows, cols)))
        spans = [_span(rows, cols, hidden, links) for links in (BYTES, nvlink)]
        spans += [_span(rows, cols, hidden, over_nodes(cols)) if devices > NODE else "one node"]
        yield f"{rows} x {cols}", *each, f"{grid.fixed / hidden**2:.1f}", *messages, *spans


def _span(rows: int, cols: int, hidden: int, links: Links) -> str:
    span = cheaper(rows, cols, hidden, links)
    if span is None:
        return "never"
    low, high = (tokens / hidden for tokens in span)
    if (low, high) == (0, math.inf):
        return "always"
    return f"from {low:.2f}" if high == math.inf else f"{low:.2f} to {high:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints when a grid is cheaper than 1D tensor with sequence parallelism."""
    parser = Parser(prog="python -m benchmarks.grid.break_even", description=main.__doc__)
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size D (default: 4096)")
    print(table([*rows(parser.parse_args(argv).hidden)]))
    return 0


if __name__ == "__main__":
    run_command(main)
