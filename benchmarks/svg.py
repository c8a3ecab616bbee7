"""SVG pictures for the documentation, the same bytes each time. Needs the viz extra."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from jaxptd.errors import Parser

STYLE = {"svg.hashsalt": "jaxptd", "svg.fonttype": "none", "font.size": 11}


def save(
    pictures: Mapping[str, Callable[[], Figure]], directory: Path, style: Mapping[str, Any]
) -> None:
    """Makes each picture, in `STYLE` and what `style` changes of it, and writes it by its name."""
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, **style}):
        for name, make in pictures.items():
            figure = make()
            FigureCanvasSVG(figure)
            figure.savefig(directory / name, format="svg", metadata={"Date": None, "Creator": None})


def command(
    draw: Callable[[Path], None], module: str, words: str | None, argv: Sequence[str] | None
) -> int:
    """`python -m benchmarks.<module> [--out docs/pictures]`; words: its description."""
    parser = Parser(prog=f"python -m benchmarks.{module}", description=words)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="where to")
    draw(parser.parse_args(argv).out)
    return 0
