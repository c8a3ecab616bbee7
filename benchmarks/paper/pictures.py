"""Draws the pages' pictures; the same numbers give the same bytes. Needs the viz extra.

`ring` shows which block each device multiplies at each step of RingQK and RingAV; letters: n
devices; Q, K, V blocks of a quarter of the sequence each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from benchmarks.paper.megatron import GPU, PETA, Model
from benchmarks.paper.trained import DTYPES, HEARTS, IMAGES, Curves, Hearts
from jaxptd.hardware import find_accelerator
from jaxptd.plot import BLUE, GREEN, ORANGE
from jaxptd.plot.style import COLORS, INK, new_picture, save_pictures, styled
from jaxptd.vision.masks import overlay

DEVICES = 4
FLOOR = 1e-17  # differences are drawn above this
ONE: dict[str, Any] = {"color": ORANGE, "lw": 4, "alpha": 0.5}
OTHER: dict[str, Any] = {"color": BLUE, "lw": 1}
GRID = "TP2D=4, 2 x 2"


def _finished(*every: Axes) -> None:
    for axes in every:
        axes.grid()
        axes.legend(fontsize=9)


# ---- losses -------------------------------------------------------------------------------------


@styled
def figure_9(found: Sequence[Curves]) -> Figure:
    """Draws the losses next to the perplexities, one layout on top of the other."""
    figure = new_picture(9, 3.6)
    loss, perplexity = figure.subplots(1, 2)
    step = np.arange(1, found[0].tp.size + 1)
    for axes, of in ((loss, np.asarray), (perplexity, np.exp)):
        axes.plot(step, of(found[0].tp), label="TP=4", **ONE)
        axes.plot(step, of(found[0].tp2d), label=GRID, **OTHER)
        axes.set(xlabel="step")
    _finished(loss, perplexity)
    loss.set(title="figure 8: loss, nats")
    perplexity.set(title="figure 9: perplexity", yscale="log")
    return figure


@styled
def figure_10(found: Sequence[Curves]) -> Figure:
    """Draws the float32 losses of each model above their differences, one column per model."""
    names = list(dict.fromkeys(each.name for each in found))
    figure = new_picture(4.2 * len(names), 5.2)
    rows = figure.subplots(2, len(names), squeeze=False, sharex=True, height_ratios=(2, 1))
    for name, (above, below) in zip(names, rows.T, strict=True):
        for each in (each for each in found if each.name == name):
            step = np.arange(1, each.tp.size + 1)
            if each.dtype == DTYPES[0]:
                above.plot(step, each.tp, label="TP=4", **ONE)
                above.plot(step, each.tp2d, label=GRID, **OTHER)
            color = dict(zip(DTYPES, (BLUE, GREEN), strict=True))[each.dtype]
            differences = np.maximum(each.differences, FLOOR)
            below.plot(step, differences, color=color, lw=1, label=each.dtype)
        above.set(title=name, ylabel="loss, nats")
        below.set(yscale="log", xlabel="step", ylabel="difference")
        _finished(above, below)
    return figure


@styled
def figure_13(hearts: Hearts) -> Figure:
    """Draws losses and Dice coefficients, and below them the hearts with labels and both masks."""
    figure = new_picture(9, 4.5 + 2.2 * HEARTS)
    parts: Any = figure.subfigures(2, 1, height_ratios=(4.5, 2.2 * HEARTS))
    loss, dice = parts[0].subplots(1, 2)
    at = hearts.evaluated
    for (name, each), style in zip(hearts.trained.items(), (ONE, OTHER), strict=True):
        loss.plot(np.arange(1, each.loss.size + 1), each.loss, label=name, **style)
        dice.plot(at, each.dice[at - 1], marker="o", label=name, **style)
    loss.set(title="training loss", xlabel="step")
    dice.set(title="mean Dice coefficient, held out", xlabel="step", ylim=(0, 1))
    _finished(loss, dice)
    names = ("image", "labels", *hearts.trained)
    masks = (hearts.label, *(each.found for each in hearts.trained.values()))
    for number, row in enumerate(parts[1].subplots(HEARTS, len(names), squeeze=False)):
        image = hearts.image[number]
        drawn = [overlay(image, x[number], IMAGES.classes) for x in masks]
        for axes, name, each in zip(row, names, [image[..., 0], *drawn], strict=True):
            axes.imshow(each, cmap="gray")
            axes.set(title=name if number == 0 else "", xticks=[], yticks=[])
    return figure


# ---- weak scaling -------------------------------------------------------------------------------


@styled
def weak_scaling(found: tuple[Sequence[Model], Any]) -> Figure:
    """Draws TFLOP/s per GPU next to total PFLOP/s, published and predicted."""
    models, figure = found[0], new_picture(9.6, 4.2)
    one, every = figure.subplots(1, 2, width_ratios=(3, 2))
    gpus, places = [model.gpus for model in models], range(len(models))
    rates = [model.teraflops for model in models], [model.petaflops for model in models]
    columns = "teraflops_per_gpu", "aggregate_petaflops"
    for axes, x, column, rate in zip((one, every), (places, gpus), columns, rates, strict=True):
        found = [model.published[column] for model in models]
        axes.plot(x, found, color=ORANGE, marker="o", ls="", label="published")
        axes.plot(x, rate, color=BLUE, marker="x", lw=1, label="predicted")
    peak = find_accelerator(GPU).bf16_flops
    every.plot(gpus, [n * peak / PETA for n in gpus], color=INK, ls=":", label="peak of all GPUs")
    title = "one GPU, TFLOP/s; the axis begins at 100"
    one.set(title=title, ylim=(100, 180), xlabel="parameters, and GPUs below")
    sizes = (f"{model.published['params_billion']:.4g} B\n{model.gpus:,}" for model in models)
    one.set_xticks(places, list(sizes), fontsize=8)
    every.set(title="all GPUs, PFLOP/s", xscale="log", yscale="log", xlabel="GPUs")
    every.set_xticks([32, 128, 512, 2048], ["32", "128", "512", "2,048"])
    every.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    every.minorticks_off()
    for axes in (one, every):
        axes.grid(axis="y")
        axes.legend(fontsize=9, loc="upper left")
    return figure


# ---- the ring -----------------------------------------------------------------------------------


def block(device: int, step: int, n: int = DEVICES) -> int:
    """The block of keys or values that a device has at a step; each passes its own to the next."""
    return (device - step) % n


@styled
def ring(_: Any = None) -> Figure:
    """Draws the rows of scores that each device completes, and the sums of values that it makes."""
    figure = new_picture(9, 4.9)
    for axes, letter in zip(figure.subfigures(2, 1), "KV", strict=True):
        product = "RingQK: scores = Q Kᵀ" if letter == "K" else "RingAV: output = softmax(scores) V"
        words = f"{product}; between steps each device passes its {letter} to the next"
        axes.suptitle(words, x=0.01, ha="left", color=INK)
        for step, panel in enumerate(axes.subplots(1, DEVICES)):
            _step(panel, step, letter)
    return figure


def _step(axes: Axes, step: int, letter: str) -> None:
    """Draws one step: a row of blocks per device, the finished ones and the one being made."""
    for device in range(DEVICES):
        for at in range(DEVICES):
            done = at in {block(device, earlier) for earlier in range(step)}
            now = at == block(device, step)
            color = COLORS[at] if now or done else "none"
            alpha = 1.0 if now else 0.35
            axes.add_patch(Rectangle((at, device), 0.92, 0.86, fc=color, ec=INK, alpha=alpha, lw=1))
        at = block(device, step)
        words = f"{letter}{at}"
        axes.text(at + 0.46, device + 0.43, words, ha="center", va="center", color="white")
    if step:
        arrow = FancyArrowPatch((-0.3, 0.4), (-0.3, DEVICES - 0.6), arrowstyle="->", color=INK)
        arrow.set_mutation_scale(12)
        axes.add_patch(arrow)
    axes.set(xlim=(-0.6, DEVICES), ylim=(DEVICES, -0.1), aspect="equal", xticks=[])
    axes.set_yticks([device + 0.43 for device in range(DEVICES)])
    axes.set_yticklabels([f"device {device}" if step == 0 else "" for device in range(DEVICES)])
    axes.tick_params(length=0)
    axes.set_xlabel(f"step {step}")
    for spine in axes.spines.values():
        spine.set_visible(False)


# By the page that shows it.
PICTURES: dict[str, Callable[[Any], Figure]] = {
    "paper_figure9": figure_9,
    "paper_figure10": figure_10,
    "paper_figure13": figure_13,
    "paper_ring": ring,
    "paper_weak_scaling": weak_scaling,
}


def save(page: str, found: Any, directory: Path) -> None:
    save_pictures({f"{page}.svg": partial(PICTURES[page], found)}, directory)
