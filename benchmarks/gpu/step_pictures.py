"""A picture of the least time that each scope of a step takes on an H200, from compiled steps.

`python -m benchmarks.gpu.step_pictures [--out docs/pictures]` compiles and draws. Needs matplotlib
(the viz extra) and XLA's compiler for GPUs, as described in `benchmarks/gpu/compile_gpu.py`.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
from matplotlib.figure import Figure

from benchmarks.gpu.compiled import CASES
from benchmarks.lib.svg import command
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import BANDWIDTH
from jaxptd.analysis.profiling import PEAK, least
from jaxptd.analysis.step_picture import picture
from jaxptd.compiling import gpus
from jaxptd.errors import run_command
from jaxptd.mesh import make_mesh
from jaxptd.plot.style import save_pictures
from jaxptd.step import Program

DRAWN = {"124m": "GPT-2 124M, 32 x 1024 tokens", "1.5b": "GPT-2 1.5B, 16 x 1024, remat full"}


def compiled_parts() -> Figure:
    """Draws the steps in `DRAWN`."""
    panels = {}
    for name, title in DRAWN.items():
        config = CASES[name].config
        program = Program(config, make_mesh(config.layout, gpus(1)))
        panels[title] = least(program, compile_step(program).as_text())
    rates = f"{PEAK / 1e12:g} TFLOP/s and {BANDWIDTH / 1e12:.1f} TB/s"
    return picture(panels, f"ms at {rates}:\ncompiled, not run")


PICTURES = {"step_parts.svg": compiled_parts}


def draw(directory: Path) -> None:
    """Writes the picture."""
    jax.config.update("jax_platforms", "cpu")  # the steps are only compiled for GPUs
    save_pictures(PICTURES, directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the least time of each scope of steps compiled for H200s."""
    return command(draw, "gpu.step_pictures", main.__doc__, argv)


if __name__ == "__main__":
    run_command(main)
