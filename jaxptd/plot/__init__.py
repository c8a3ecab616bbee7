"""Draws meshes, schedules, losses, loads of experts, memory, communication, steps, and plans.

Each function returns a matplotlib Figure, which a notebook shows; `save` writes it to a file.
Functions live next to what they draw and are imported on first use, because matplotlib comes with
an extra: `pip install -e '.[viz]'`.

    from jaxptd import plot

    plot.loss(run)                              # a Run, or several by name
    plot.expert_load(run)                       # how unequal the loads of its experts are
    plot.mesh(jaxptd.Layout(dp=2, tp=4))
    plot.schedule(jaxptd.make_schedule("zb-h1", stages=4, micro_batches=8))
    plot.memory(jaxptd.memory(config))
    plot.bytes_by_axis(jaxptd.comms(config))
    plot.step_time(jaxptd.profile(config))
    plot.plan(jaxptd.plan(config, gpus=64, gpu="h200"))
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxptd.errors import UserError, install

if TYPE_CHECKING:
    from jaxptd.plot.figures import bytes_by_axis as bytes_by_axis
    from jaxptd.plot.figures import expert_load as expert_load
    from jaxptd.plot.figures import loss as loss
    from jaxptd.plot.figures import memory as memory
    from jaxptd.plot.figures import mesh as mesh
    from jaxptd.plot.figures import plan as plan
    from jaxptd.plot.style import save as save

# The colors of all pictures, legible on light and on dark pages.
BLUE, ORANGE, GREEN, PURPLE = "#2b6cb0", "#c05621", "#2f855a", "#805ad5"
PINK, SKY, AMBER = "#b83280", "#4299e1", "#b7791f"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, PINK, SKY, AMBER)
INK = "#718096"  # text and lines

# Operations of a pipeline, drawn under dark text.
FORWARD, BACKWARD, WEIGHTS = SKY, "#38a169", "#dd6b20"

FILLS = ("#bee3f8", "#feebc8", "#c6f6d5", "#e9d8fd")  # drawn under dark text
DARK = "#1a202c"  # text on fills

_HOMES = {
    "bytes_by_axis": ("jaxptd.plot.figures", "bytes_by_axis"),
    "expert_load": ("jaxptd.plot.figures", "expert_load"),
    "loss": ("jaxptd.plot.figures", "loss"),
    "memory": ("jaxptd.plot.figures", "memory"),
    "mesh": ("jaxptd.plot.figures", "mesh"),
    "plan": ("jaxptd.plot.figures", "plan"),
    "save": ("jaxptd.plot.style", "save"),
    "schedule": ("jaxptd.pipeline.picture", "figure"),
    "step_time": ("jaxptd.analysis.step_picture", "step_time"),
}
FORMATS = ("png", "svg")

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxptd.plot' has no attribute {name!r}")
    module, function = _HOMES[name]
    return getattr(drawing(module), function)


def __dir__() -> list[str]:
    return [*_HOMES]


def format_of(path: str | Path) -> str:
    """The format that a path's suffix names. Raises UserError for anything but PNG or SVG."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UserError(f"picture {path}: use a name that ends in .png or .svg")
    return suffix


def drawing(module: str) -> Any:
    """Imports a module that draws.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError(f"a picture needs matplotlib; {install('viz')}") from error
