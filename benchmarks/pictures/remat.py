"""A picture of the bytes that a layer saves for backward under each remat policy, by formula.

Letters: b sequences of a micro-batch, T tokens, D model.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxptd.analysis.memory_model import kept_by_layer
from jaxptd.analysis.memory_report import published_layer
from jaxptd.config import Config, ModelConfig, Remat
from jaxptd.mesh import Layout
from jaxptd.models.families import architecture_of
from jaxptd.plot import AMBER, BLUE, GREEN, ORANGE, PINK, PURPLE
from jaxptd.plot.style import INK, PAGE

# One layer of a GPT-2 of 1.5 B parameters, in bfloat16.
MODEL = ModelConfig(
    num_layers=1, hidden_size=1536, num_heads=24, seq_length=1024, vocab_size=256, dtype="bfloat16"
)
LAYOUTS = (Layout(), Layout(tp=4), Layout(tp=4, sequence_parallel=True), Layout(row=2, col=2))
POLICIES: tuple[Remat, ...] = ("none", "attention", "dots", "full")
# What is drawn as one bar: how the names of `kept_by_layer` begin, and a color.
GROUPS = {
    "the layer's input": (("the layer's input",), BLUE),
    "residual sums, norms": (("the residual sum", "input of the second norm", "statistics"), GREEN),
    "inputs of the first matmuls": (("input of the product", "input of the up product"), AMBER),
    "q, k, v": (("q, k, v",), ORANGE),
    "attention's output": (("attention's output", "logsumexp"), PINK),
    "hidden units of the MLP": (("input of the activation", "input of the down product"), PURPLE),
}


def kept() -> Figure:
    """Draws a bar per policy, a panel per layout, and published figures without scores as lines."""
    figure = Figure(figsize=(PAGE, 5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        _panel(axes, Config(model=MODEL, layout=layout))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _panel(axes: Axes, config: Config) -> None:
    unit = config.train.global_batch_size * MODEL.seq_length * MODEL.hidden_size
    left = np.zeros(len(POLICIES))
    for (name, (_, color)), sizes in zip(GROUPS.items(), by_group(config).values(), strict=True):
        axes.barh(POLICIES, sizes / unit, left=left, color=color, ec=INK, lw=0.5, label=name)
        left += sizes / unit
    label = "published, without scores"
    for remat, like in (("none", "attention"), ("full", "full")):
        y, size = POLICIES.index(remat), published_layer(config, like) or 0
        axes.plot([size / unit] * 2, [y - 0.45, y + 0.45], color=INK, lw=3, label=label)
        label = "_"
    axes.set_title(str(config.layout))
    axes.set_ylim(len(POLICIES) - 0.5, -0.5)
    axes.label_outer()
    axes.set_xlabel("bytes per device / (b T D)")


def by_group(config: Config) -> dict[str, np.ndarray]:
    """Bytes that a layer saves on one device, by `GROUPS` and policy.

    Raises:
        ValueError: something that a layer saves is in no group.
    """
    found = {name: np.zeros(len(POLICIES)) for name in GROUPS}
    (stack,) = architecture_of(MODEL).stacks
    for kept in kept_by_layer(config, stack):
        groups = [name for name, (starts, _) in GROUPS.items() if kept.name.startswith(starts)]
        (group,) = groups
        found[group] += [kept.bytes * kept.times.get(remat, 0) for remat in POLICIES]
    return found


PICTURES = {"remat_kept.svg": kept}
