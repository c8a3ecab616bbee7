"""Figure 10: losses of small models of each family, trained on both layouts of table 4.

The text is the Python standard library's source, in bytes. `jaxptd.train` trains every model on
four simulated devices, once with TP=4 and once on a grid of 2 x 2, in float32; and once more each
in float64, where curves could differ only if a layout computed something else.
"""

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jaxptd
from benchmarks.paper import published
from benchmarks.paper.models import PaperModel, omitted
from jaxptd.analysis.report import table, versions
from jaxptd.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from jaxptd.mesh import Layout
from jaxptd.plot.colors import BLUE, GREEN, ORANGE
from jaxptd.plot.style import new_picture, save_pictures, styled

PICTURE = "paper_figure10.svg"
LAYOUTS = (Layout(tp=4), Layout(row=2, col=2, ring="blockwise"))
LAYERS, HIDDEN, HEADS, BATCH, LENGTH = 2, 128, 4, 8, 64
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=30)
DTYPES = ("float32", "float64")
FLOOR = 1e-17  # differences are drawn above this
ROWS = 10  # of the table of losses
HEAD = ("model", "precision", "loss of step 1", "of the last step", "largest difference", "in step")


@dataclasses.dataclass(frozen=True)
class Curves:
    """The losses of one model, of every step, nats a target: all terms together.

    Args:
        name: of the model.
        dtype: of its computation.
        tp: with TP=4.
        tp2d: on the grid.
    """

    name: str
    dtype: str
    tp: np.ndarray
    tp2d: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        return np.abs(self.tp - self.tp2d)

    @property
    def row(self) -> list[str]:
        """Its row of the table of differences."""
        found = self.differences
        ends = [f"{self.tp[0]:.4f}", f"{self.tp[-1]:.4f}"]
        step = int(found.argmax()) + 1
        return [self.name, self.dtype, *ends, f"{found.max():.1e}", str(step)]


# ---- training -------------------------------------------------------------------------------


def config(model: PaperModel, layout: Layout, *, dtype: str, steps: int, run_dir: Path) -> Config:
    """A small model of a family."""
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": HEADS, "seq_length": LENGTH}
    small = ModelConfig(family=model.family, dtype=dtype, **{**sizes, **model.small})
    train = TrainConfig(
        steps=steps,
        global_batch_size=BATCH,
        log_every=1,
        eval_every=0,
        sample_tokens=0,
        run_dir=str(run_dir),
        platform="cpu",
    )
    never = CheckpointConfig(every=0)
    return Config(small, layout, optimizer=OPTIMIZER, train=train, checkpoint=never)


def losses(model: PaperModel, layout: Layout, *, dtype: str, steps: int) -> np.ndarray:
    """Trains a small model and returns the loss of each step.

    Raises:
        KeyboardInterrupt: a signal stopped the training.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(dtype == "float64"):
        made = config(model, layout, dtype=dtype, steps=steps, run_dir=Path(folder) / "run")
        run = jaxptd.train(made, quiet=True)
        found = np.asarray(run.metrics["loss"])
    if run.stopped:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - start
    print(f"{model.name} {dtype} {layout}: {found[0]:.4f} to {found[-1]:.4f}, {seconds:.0f} s")
    return found


def trained(
    models: Sequence[PaperModel], steps: int, dtypes: Sequence[str] = DTYPES
) -> list[Curves]:
    """Trains every model on both layouts, in both precisions or in one."""
    return [
        Curves(
            model.name,
            dtype,
            *(losses(model, layout, dtype=dtype, steps=steps) for layout in LAYOUTS),
        )
        for dtype in dtypes
        for model in models
    ]


# ---- picture and page -----------------------------------------------------------------------


@styled
def picture(found: Sequence[Curves]) -> Figure:
    """Draws the float32 losses of each model above the differences, a column for each model."""
    names = list(dict.fromkeys(each.name for each in found))
    figure = new_picture(4.2 * len(names), 5.2)
    rows = figure.subplots(2, len(names), squeeze=False, sharex=True, height_ratios=(2, 1))
    for name, (above, below) in zip(names, rows.T, strict=True):
        for each in (each for each in found if each.name == name):
            _draw(each, above, below)
        above.set(title=name, ylabel="loss, nats")
        below.set(yscale="log", xlabel="step", ylabel="difference")
        for axes in (above, below):
            axes.grid()
            axes.legend(fontsize=9)
    return figure


def draw(found: Sequence[Curves], directory: Path) -> None:
    """Writes the picture, with the same bytes for the same losses."""
    save_pictures({PICTURE: lambda: picture(found)}, directory)


def _draw(each: Curves, above: Axes, below: Axes) -> None:
    step = np.arange(1, each.tp.size + 1)
    if each.dtype == DTYPES[0]:
        above.plot(step, each.tp, color=ORANGE, lw=4, alpha=0.5, label="TP=4")
        above.plot(step, each.tp2d, color=BLUE, lw=1, label="TP2D=4, 2 x 2")
    color = dict(zip(DTYPES, (BLUE, GREEN), strict=True))[each.dtype]
    below.plot(step, np.maximum(each.differences, FLOOR), color=color, lw=1, label=each.dtype)


def page(found: Sequence[Curves], models: Sequence[PaperModel]) -> str:
    """The page of results, in Markdown."""
    narrow = [each for each in found if each.dtype == DTYPES[0]]
    steps = narrow[0].tp.size
    shown = sorted({1, *(steps * i // ROWS for i in range(1, ROWS + 1))} - {0})
    head = ["step", *(f"{each.name}, {name}" for each in narrow for name in ("TP=4", "2 x 2"))]
    rows = [
        [str(step), *(f"{x[step - 1]:.4f}" for each in narrow for x in (each.tp, each.tp2d))]
        for step in shown
    ]
    sections = (
        versions("flax", "optax"),
        _introduction(steps),
        omitted(models),
        f"![Losses of both layouts, and their differences]({PICTURE})",
        table([HEAD, *(each.row for each in found)]),
        _words(),
        "Losses in float32:",
        table([head, *rows]),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(steps: int) -> str:
    return (
        f"Small models, {LAYERS} layers of {HIDDEN} with {HEADS} heads, {BATCH} sequences of "
        f"{LENGTH} bytes of the\nstandard library's source, {steps} steps of AdamW: trained by "
        "`jaxptd.train` on four simulated devices,\n`tp=4` and `row=2 col=2`. Losses are of the "
        "training batches, all terms together."
    )


def _words() -> str:
    tp, tp2d = (published.perplexity(name) for name in ("TP", "TP2D"))
    return (
        "The layouts compute the same function, and the curves are the same: in float64 they "
        "differ by\nroundings only. In float32 the same roundings are larger, and training makes "
        "them grow.\n\nPublished: of figure 10 only the picture, without numbers. Figure 9 has, "
        f"of GPT, a perplexity of {tp} with TP\nand {tp2d} with TP2D ({np.log(tp):.2f} and "
        f"{np.log(tp2d):.2f} nats). Layouts that compute the same cannot differ by that:\nthe two "
        "runs had different seeds, data or steps, or one of them computed something else."
    )
