"""Figures 8 and 9: loss and perplexity of a small GPT on both layouts, which are the same curve.

The runs are those of figure 10, in float32; the paper's curves end apart.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper import published
from benchmarks.paper.curves.figure10 import BATCH, DTYPES, HIDDEN, LAYERS, LENGTH, Curves, trained
from benchmarks.paper.models import MODELS
from jaxptd.analysis.report import table, versions
from jaxptd.plot.colors import BLUE, ORANGE
from jaxptd.plot.style import new_picture, save_pictures, styled

PICTURE = "paper_figure9.svg"
ROWS = 6  # of the table
HEAD = ("step", "loss, TP=4", "loss, 2 x 2", "perplexity, TP=4", "perplexity, 2 x 2")


def curves(steps: int) -> Curves:
    """Trains the small GPT on both layouts."""
    (found,) = trained(MODELS[:1], steps, DTYPES[:1])
    return found


@styled
def picture(found: Curves) -> Figure:
    """Draws the losses beside the perplexities, one layout over the other."""
    figure = new_picture(9, 3.6)
    loss, perplexity = figure.subplots(1, 2)
    step = np.arange(1, found.tp.size + 1)
    for axes, of in ((loss, np.asarray), (perplexity, np.exp)):
        axes.plot(step, of(found.tp), color=ORANGE, lw=4, alpha=0.5, label="TP=4")
        axes.plot(step, of(found.tp2d), color=BLUE, lw=1, label="TP2D=4, 2 x 2")
        axes.set(xlabel="step")
        axes.grid()
        axes.legend(fontsize=9)
    loss.set(title="figure 8: loss, nats")
    perplexity.set(title="figure 9: perplexity", yscale="log")
    return figure


def draw(found: Curves, directory: Path) -> None:
    """Writes the picture, with the same bytes for the same losses."""
    save_pictures({PICTURE: lambda: picture(found)}, directory)


def page(found: Curves) -> str:
    """The page of results, in Markdown."""
    steps = found.tp.size
    shown = sorted({1, *(steps * i // ROWS for i in range(1, ROWS + 1))} - {0})
    rows = [
        [str(n), *(f"{x[n - 1]:.4f}" for x in both), *(f"{np.exp(x[n - 1]):.2f}" for x in both)]
        for n in shown
        for both in [(found.tp, found.tp2d)]
    ]
    sections = (
        versions("flax", "optax"),
        _words(found),
        f"![Loss and perplexity of both layouts]({PICTURE})",
        table([HEAD, *rows]),
    )
    return "\n\n".join(sections) + "\n"


def _words(found: Curves) -> str:
    tp, tp2d = (published.perplexity(name) for name in ("TP", "TP2D"))
    return f"""\
A small GPT, {LAYERS} layers of {HIDDEN}, {BATCH} sequences of {LENGTH} bytes of the standard
library's source, {found.tp.size} steps, trained by `jaxptd.train` on four simulated devices with
`tp=4` and with `row=2 col=2`, float32. The curves are one curve: the largest difference of a loss
is {found.differences.max():.1e}. *Published*, of a GPT of 2.5 B after 300 iterations: a perplexity
of {tp} with TP and {tp2d} with TP2D, {np.log(tp):.2f} and {np.log(tp2d):.2f} nats. Layouts that
compute the same function cannot end apart by that."""
