"""A picture of the least time that each part of a step takes on an H200, from compiled steps.

`python -m benchmarks.step_pictures [--out docs/pictures]` compiles and draws. Needs matplotlib (the
viz extra) and, as `benchmarks/compile_gpu.py` says, XLA's compiler for GPUs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import svg
from benchmarks.compile_gpu import gpus
from benchmarks.compiled import BANDWIDTH, CASES
from benchmarks.kernels import KINDS
from benchmarks.measure import compile_step
from benchmarks.step_parts import PEAK, SCOPES, Times, least
from jaxptd.errors import run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

COLORS = dict(zip(KINDS, ("#2b6cb0", "#63b3ed", "#f6ad55", "#c05621"), strict=True))
DRAWN = {"124m": "GPT-2 124M, 32 x 1024 tokens", "1.5b": "GPT-2 1.5B, 16 x 1024, remat full"}
STYLE = {"font.size": 9}


def picture(panels: Mapping[str, Times], label: str) -> Figure:
    """A panel a step, a bar a scope, a color a kind."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, times) in zip(every, panels.items(), strict=True):
        _panel(axes, times)
        axes.set_title(f"{title}: {1e3 * sum(times.values()):.3g} ms", fontsize=10, loc="left")
        axes.set_xlabel(label)
    handles, names = every[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, times: Times) -> None:
    left = np.zeros(len(SCOPES))
    for kind in KINDS:
        widths = np.array([1e3 * times.get((scope, kind), 0.0) for scope in SCOPES])
        if kind == KINDS[-1] and not widths.any():
            continue
        axes.barh(SCOPES, widths, left=left, color=COLORS[kind], ec="white", lw=0.5, label=kind)
        left += widths
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def compiled_parts() -> Figure:
    """Of the steps in `DRAWN`."""
    panels = {}
    for name, title in DRAWN.items():
        case = CASES[name]
        program = Program(case.config, make_mesh(case.layout, gpus(1)))
        panels[title] = least(program, compile_step(program).as_text())
    rates = f"{PEAK / 1e12:g} TFLOP/s and {BANDWIDTH / 1e12:.1f} TB/s"
    return picture(panels, f"ms at {rates}: compiled, not run")


PICTURES = {"step_parts.svg": compiled_parts}


def draw(directory: Path) -> None:
    """Writes the picture."""
    jax.config.update("jax_platforms", "cpu")  # what starts here; compiled is for GPUs
    svg.save(PICTURES, directory, STYLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the least time of each part of steps compiled for H200s."""
    return svg.command(draw, "step_pictures", main.__doc__, argv)


if __name__ == "__main__":
    run_command(main)
