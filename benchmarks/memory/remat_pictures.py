"""A picture of the bytes that a layer keeps for backward under each remat policy, by formula.

`python -m benchmarks.memory.remat_pictures [--out docs/pictures]` writes it, with the same bytes
each time. Needs matplotlib (the viz extra).

Letters: b sequences of a micro-batch, T tokens, D model.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lib.svg import command
from jaxptd.analysis.memory_model import kept_by_layer
from jaxptd.analysis.memory_report import published_layer
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.errors import run_command
from jaxptd.mesh import Layout
from jaxptd.models.families import inventory_of
from jaxptd.plot.style import CARD, save

# One layer of a GPT-2 of 1.5 B parameters, in bfloat16.
MODEL = ModelConfig(
    num_layers=1, hidden_size=1536, num_heads=24, seq_length=1024, vocab_size=256, dtype="bfloat16"
)
LAYOUTS = (Layout(), Layout(tp=4), Layout(tp=4, sequence_parallel=True), Layout(row=2, col=2))
POLICIES: tuple[Remat, ...] = ("none", "attention", "dots", "full")
COLORS = ("#2b6cb0", "#718096", "#63b3ed", "#c05621", "#f6ad55", "#fbd38d", "#2f855a")
COLORS += ("#68d391", "#1a202c", "#b794f4", "#6b46c1", "#b83280")
STYLE = CARD | {"font.size": 9}


def kept() -> Figure:
    """Draws a bar per policy, a panel per layout, and published figures without scores as lines."""
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flat
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        _panel(axes, Config(model=MODEL, layout=layout))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, config: Config) -> None:
    unit = config.train.global_batch_size * MODEL.seq_length * MODEL.hidden_size
    begin = dict.fromkeys(POLICIES, 0.0)
    (stack,) = inventory_of(MODEL).stacks
    for kept, color in zip(kept_by_layer(config, stack), COLORS, strict=False):
        sizes = [kept.bytes * kept.times.get(remat, 0) / unit for remat in POLICIES]
        left = list(begin.values())
        axes.barh(POLICIES, sizes, left=left, color=color, ec="white", lw=0.5, label=kept.name)
        begin = {r: begin[r] + size for r, size in zip(POLICIES, sizes, strict=True)}
    label = "published: none without scores, full"
    for remat, like in (("none", "attention"), ("full", "full")):
        y, size = POLICIES.index(remat), published_layer(config, like) or 0
        axes.plot([size / unit] * 2, [y - 0.45, y + 0.45], color="black", lw=2, label=label)
        label = "_"
    axes.set_title(str(config.layout), fontsize=10, loc="left")
    axes.set_xlabel("bytes / (b T D)")
    axes.invert_yaxis() if not axes.yaxis_inverted() else None
    axes.spines[["top", "right"]].set_visible(False)


PICTURES = {"remat_kept.svg": kept}


def draw(directory: Path) -> None:
    """Writes the picture."""
    save(PICTURES, directory, STYLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the bytes that a layer keeps under each remat policy."""
    return command(draw, "memory.remat_pictures", main.__doc__, argv)


if __name__ == "__main__":
    run_command(main)
