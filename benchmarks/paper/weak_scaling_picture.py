"""The picture of weak scaling: rates of one GPU and of all, published and predicted."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.weak_scaling import GPU, PETA, Model
from jaxptd.hardware import find_accelerator
from jaxptd.plot.colors import BLUE, INK, ORANGE
from jaxptd.plot.style import new_picture, save_pictures, styled

PICTURE = "paper_weak_scaling.svg"


@styled
def picture(models: Sequence[Model]) -> Figure:
    """Draws TFLOP/s of a GPU beside PFLOP/s of all, over the number of GPUs."""
    figure = new_picture(9.6, 4.2)
    one, every = figure.subplots(1, 2, width_ratios=(3, 2))
    gpus, places = [model.gpus for model in models], range(len(models))
    _curves(one, places, "teraflops_per_gpu", [model.teraflops for model in models], models)
    _curves(every, gpus, "aggregate_petaflops", [model.petaflops for model in models], models)
    peak = find_accelerator(GPU).bf16_flops
    every.plot(gpus, [n * peak / PETA for n in gpus], color=INK, ls=":", label="peak of all GPUs")
    one.set(
        title="one GPU, TFLOP/s; the axis begins at 100",
        ylim=(100, 180),
        xlabel="parameters, and GPUs below",
    )
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


def draw(models: Sequence[Model], directory: Path) -> None:
    """Writes the picture, with the same bytes for the same rates."""
    save_pictures({PICTURE: lambda: picture(models)}, directory)


def _curves(
    axes: Axes, x: Sequence[int], column: str, predicted: Sequence[float], models: Sequence[Model]
) -> None:
    found = [model.published[column] for model in models]
    axes.plot(x, found, color=ORANGE, marker="o", ls="", label="published")
    axes.plot(x, predicted, color=BLUE, marker="x", lw=1, label="predicted")
