"""Pictures of the cost of sharing a sequence: who computes which scores, and what hides a message.

Letters: T tokens of a sequence, D model, n devices.
"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from benchmarks.context.costs import LINKS, PEAK, Pass, hop_bytes, tokens_to_hide, visit_flops
from benchmarks.context.exchanges import EXCHANGES, H200, config_of, mfu
from jaxptd.attention.attend import Ring
from jaxptd.planner.steps.step import predict
from jaxptd.plot import BLUE, FILLS
from jaxptd.plot.style import COLORS, INK, PAGE

WIDTH = 4096  # D for the times drawn; where lines cross does not depend on it


def owners(kind: Any, n: int) -> np.ndarray:
    """The device of each of 2n chunks of a sequence."""
    order = Ring("cp", kind).order(2 * n, n)
    device = np.empty(2 * n, int)
    device[order] = np.arange(2 * n) // 2
    return device


def work(kind: Any, n: int) -> np.ndarray:
    """The scores that each device computes, in units of a chunk's queries times a chunk's keys."""
    device = owners(kind, n)
    return np.array([np.sum(np.flatnonzero(device == i) + 0.5) for i in range(n)])


def work_map(n: int = 4) -> Figure:
    """Draws the T x T scores of causal attention, coloured by the device that computes them."""
    figure = Figure(figsize=(PAGE, 4.3), layout="constrained")
    kinds = {"blockwise": "contiguous (blockwise)", "zigzag": "zigzag"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        device = owners(kind, n)
        for row, key in np.ndindex(2 * n, 2 * n):
            if key <= row:
                _cell(axes, row, key, device[row])
        axes.set(xlim=(0, 2 * n), ylim=(2 * n, 0), aspect="equal", title=title)
        axes.set_xlabel("chunks of keys")
        axes.set_ylabel("device of each chunk of queries")
        axes.legend(handles=_shares(work(kind, n)), loc="upper right", title="computed by")
        axes.set_xticks([])
        axes.set_yticks(np.arange(2 * n) + 0.5, [str(i) for i in device])
    return figure


def _shares(blocks: np.ndarray) -> list[Patch]:
    """The entries of a legend: how many blocks each device computes."""
    return [
        Patch(facecolor=FILLS[i], edgecolor=COLORS[i], label=f"device {i}: {amount:g} blocks")
        for i, amount in enumerate(blocks)
    ]


def _cell(axes: Axes, row: int, key: int, device: int) -> None:
    """Draws one block of scores: a square, or on the diagonal a triangle."""
    style = {"facecolor": FILLS[device], "edgecolor": COLORS[device]}
    if key < row:
        axes.add_patch(Rectangle((key, row), 1, 1, **style))
    else:
        axes.add_patch(Polygon([(key, row), (key, row + 1), (key + 1, row + 1)], **style))


def break_even() -> Figure:
    """Draws the time of a hop, and of the attention that hides it, over tokens per device."""
    figure = Figure(figsize=(PAGE, 4.2), layout="constrained")
    pair = figure.subplots(1, 2, sharey=True)
    both: tuple[Pass, Pass] = ("forward", "backward")
    for axes, which in zip(pair, both, strict=True):
        _times(axes, which)
    pair[0].set_ylabel(f"time for B = 1, D = {WIDTH}, in µs")
    handles, names = pair[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _times(axes: Axes, which: Pass) -> None:
    tokens = np.geomspace(512, 131072, 33)
    fastest = visit_flops(which, "zigzag") * tokens**2 * WIDTH / PEAK * 1e6
    label = "attention of a visit, 100% to 50% of peak"
    axes.fill_between(tokens, fastest, 2 * fastest, color=BLUE, alpha=0.4, lw=0, label=label)
    for (name, link), color in zip(LINKS.items(), (COLORS[1], COLORS[3]), strict=True):
        hop = hop_bytes(which) * WIDTH / link * 1e6
        axes.plot(tokens, hop * tokens, color=color, label=f"hop over {name}")
        edges = [tokens_to_hide(which, "zigzag", link=link, efficiency=x) for x in (0.5, 1.0)]
        axes.plot(edges, [hop * x for x in edges], "o", color=color, markersize=4)
        for x, side, offset in zip(edges, ("right", "left"), ((-6, 4), (6, -10)), strict=True):
            style: Any = {"textcoords": "offset points", "ha": side, "fontsize": 8}
            axes.annotate(f"{x:,.0f}", (x, hop * x), offset, **style)
    axes.plot([], [], "o", color=INK, markersize=4, label="hidden from this many tokens on")
    axes.set(xscale="log", yscale="log", title=which, xlabel="tokens on a device, T / cp")
    axes.set_xlim(tokens[0], tokens[-1])
    axes.set_xticks(2 ** np.arange(9, 18, 2), [f"{2**i:,}" for i in range(9, 18, 2)])
    axes.minorticks_off()
    axes.grid()


LENGTHS = 2 ** np.arange(13, 21)


def exchanges() -> Figure:
    """Draws the MFU of Llama 3 8B by sequence length, for each way to share a sequence."""
    figure = Figure(figsize=(PAGE, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, layout), color in zip(EXCHANGES.items(), COLORS, strict=False):
        configs = [config_of(layout, int(T)) for T in LENGTHS]
        shares = [100 * mfu(each, predict(each, H200).seconds) for each in configs]
        axes.plot(LENGTHS, shares, "o-", color=color, label=name)
    axes.set(xscale="log", xlabel="tokens in a sequence, T", ylabel="predicted MFU, %")
    axes.set_xticks(LENGTHS[1::2], [f"{T:,}" for T in LENGTHS[1::2]])
    axes.set_ylim(0)
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    axes.grid()
    return figure


PICTURES = {
    "ring_zigzag.svg": work_map,
    "context_break_even.svg": break_even,
    "context_exchanges.svg": exchanges,
}
