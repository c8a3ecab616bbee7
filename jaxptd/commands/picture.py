"""`--picture F`: checked before a command begins, drawn at its end. Needs the viz extra."""

import importlib.util
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxptd.atomic_files import explained, write_whole
from jaxptd.errors import UserError

FORMATS = (".png", ".svg")
STYLE = {"svg.hashsalt": "jaxptd", "svg.fonttype": "none", "font.size": 10}
SAME_BYTES = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
REMEDY = "name a file in a folder that exists and can be written"


def check_picture(path: Path) -> None:
    """Raises UserError unless a picture can be drawn there; writes nothing."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--picture {path}: use a name that ends in {' or '.join(FORMATS)}")
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise UserError(f"--picture {path}: cannot write in {path.parent}; {REMEDY}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--picture: matplotlib is not installed; pip install 'jaxptd[viz]'")


def draw(path: Path, make: Callable[[], Any], style: Mapping[str, Any] | None = None) -> None:
    """Writes a picture; the same figure gives the same bytes.

    Args:
        path: a file that `check_picture` accepted.
        make: makes the matplotlib Figure.
        style: matplotlib's settings, besides `STYLE`.

    Raises:
        UserError: the file cannot be written.
    """
    write_whole({path: render(path, make, style)}, lambda _: explained(f"--picture {path}", REMEDY))


def render(path: Path, make: Callable[[], Any], style: Mapping[str, Any] | None = None) -> bytes:
    """The bytes that `draw` writes."""
    import matplotlib

    suffix, out = path.suffix.lower(), io.BytesIO()
    settings: Any = {**STYLE, **(style or {})}
    with matplotlib.rc_context(settings):
        make().savefig(out, format=suffix[1:], dpi=120, metadata=SAME_BYTES[suffix])
    return out.getvalue()
