"""The style of all pictures, and how they are saved. Needs the viz extra.

Backgrounds are transparent, so that pictures are legible on light and on dark pages.
"""

import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from jaxptd.atomic_files import explained, write_whole
from jaxptd.fields import checked
from jaxptd.plot import COLORS, INK, format_of

STYLE: dict[str, Any] = {
    "svg.hashsalt": "jaxptd",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), INK),
    "grid.alpha": 0.3,
}
PAGE = 7.6  # inches, the width of a documentation page, which shrinks wider pictures
NO_DATE: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


class Picture(Figure):
    """A figure that notebooks display without pyplot."""

    def _repr_svg_(self) -> str:
        return to_bytes(self, "svg").decode()


def new_picture(width: float, height: float) -> Picture:
    """An empty picture; sizes in inches."""
    return Picture(figsize=(width, height), layout="constrained")


P = ParamSpec("P")


def styled(make: Callable[P, Figure]) -> Callable[P, Figure]:
    """Makes a function draw its figure in the style of all pictures."""

    @functools.wraps(make)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
            return make(*args, **kwargs)

    return in_style


def to_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as "svg" or "png"; the same bytes each time."""
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure.savefig(out, format=kind, dpi=120, metadata=NO_DATE[kind])
    return out.getvalue()


def save_pictures(pictures: Mapping[str, Callable[[], Figure]], directory: Path) -> None:
    """Draws each picture in `STYLE` and writes it as SVG under its name."""
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        for name, make in pictures.items():
            make().savefig(directory / name, format="svg", metadata=NO_DATE["svg"])


@checked("jaxptd.plot.save")
def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure as SVG or PNG, by the path's suffix; the same figure gives the same bytes.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    path = Path(path)
    data = to_bytes(figure, format_of(path))
    remedy = "name a file in a folder that exists"
    write_whole({path: data}, lambda path: explained(f"cannot write {path}", remedy))
