"""Writes figures to files."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxptd.atomic_files import explained, write_whole
from jaxptd.fields import checked
from jaxptd.plot import format_of
from jaxptd.plot.style import to_bytes


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
