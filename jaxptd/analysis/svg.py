"""Saves figures as SVG, with the same bytes each time. Needs the viz extra."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

STYLE: dict[str, Any] = {"svg.hashsalt": "jaxptd", "svg.fonttype": "none", "font.size": 11}


def save(
    pictures: Mapping[str, Callable[[], Figure]], directory: Path, style: Mapping[str, Any]
) -> None:
    """Makes each picture in `STYLE`, with the changes in `style`, and writes it under its name."""
    directory.mkdir(parents=True, exist_ok=True)
    both: Any = STYLE | dict(style)
    with matplotlib.rc_context(both):
        for name, make in pictures.items():
            figure = make()
            FigureCanvasSVG(figure)
            figure.savefig(directory / name, format="svg", metadata={"Date": None, "Creator": None})
