"""Runs the notebooks and writes them as pages of the documentation, with output and pictures.

`python docs/tutorial_pages.py [NAME ...] [--out docs/tutorials]`, or `make tutorials`, which takes
five minutes on two cores. Needs the notebooks, viz and hf extras. Building the documentation then
runs nothing. `tests/project/test_tutorial_pages.py` fails for a page whose notebook has changed.

A page is MyST for Sphinx, and is read on a host of repositories too. Code is marked `py` and not
`python`: the tests of the pages run the latter, and a notebook runs as a whole.
"""

import base64
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.errors import Parser, UserError, run_command
from jaxptd.plot import INK

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.py"), key=lambda path: int(path.stem.split("_")[0]))
NOTEBOOKS = {path.stem: path for path in FILES}
# Run before the first cell, and not shown: pictures are drawings in the style of the pages. Text
# within axes is on fills.
STYLE = """
import matplotlib
from matplotlib_inline.backend_inline import set_matplotlib_formats
from jaxptd.plot import DARK, INK
from jaxptd.plot.style import STYLE
%matplotlib inline
set_matplotlib_formats("svg")
matplotlib.rcParams.update(STYLE | {"text.color": DARK, "legend.labelcolor": INK})
"""


MILLISECONDS = 1200  # of a frame of a moving picture
BEGIN, END = "<!-- output -->", "<!-- end of output -->"
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # of a terminal
COMMAND = re.compile(r"^!", re.M)
NOTE = """<!-- `make tutorials` made this page of notebooks/{name}.py. -->

"""
SOURCE = """

This page is the notebook [{name}.py](../../notebooks/{name}.py), run on eight simulated devices.
"""


def run(path: Path) -> Any:
    """Runs a notebook in a fresh directory and returns it with its outputs."""
    import jupytext
    import nbclient
    import nbformat

    notebook = jupytext.read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STYLE))
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # With the epoch as their date, the same pictures are the same files.
    environment = os.environ | {"PYTHONPATH": search, "SOURCE_DATE_EPOCH": "0"}
    with tempfile.TemporaryDirectory() as directory:
        where = {"metadata": {"path": directory}}
        client = nbclient.NotebookClient(notebook, timeout=900, resources=where)
        client.execute(env=environment)
    del notebook.cells[0]
    return notebook


def write(name: str, directory: Path) -> None:
    """Runs a notebook and writes its page and pictures; old pictures of it are removed."""
    text, pictures = page(run(NOTEBOOKS[name]), name)
    text = text.replace(f"{ROOT}{os.sep}", "")
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"{name}_*"):
        old.unlink()
    for file, content in pictures.items():
        (directory / file).write_bytes(content)
    (directory / f"{name}.md").write_text(text, encoding="utf-8")


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Writes a notebook that has run as a page.

    Args:
        notebook: its cells, with outputs or without.
        name: of its file, without a suffix.

    Returns:
        The page, and the files of its pictures by name.
    """
    pictures: dict[str, bytes] = {}
    parts = [part for cell in notebook.cells for part in _cell(cell, name, pictures)]
    return NOTE.format(name=name) + "\n\n".join(parts) + SOURCE.format(name=name), pictures


def without_outputs(text: str) -> str:
    """The page of the same notebook before it runs."""
    return re.sub(rf"\n\n{BEGIN}.*?{END}", "", text, flags=re.S)


def _cell(cell: Any, name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """The blocks of one cell; adds the pictures that it draws."""
    if cell.cell_type == "markdown":
        yield re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", cell.source)
        return
    if title := cell.metadata.get("title"):
        yield title
    kind = "text" if COMMAND.search(cell.source) else "py"  # Python has no lines with commands
    yield f"```{kind}\n{cell.source}\n```"
    shown = [block for output in _joined(cell.outputs) for block in _output(output, name, pictures)]
    if shown:
        yield "\n\n".join([BEGIN, *shown, END])


def _joined(outputs: Any) -> Iterator[Mapping[str, Any]]:
    """Outputs as data by type; what is printed piece by piece is one text."""
    printed = ""
    for output in outputs:
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
            continue
        if printed:
            yield {"text/plain": printed}
        printed = ""
        yield output.data
    if printed:
        yield {"text/plain": printed}


def _output(data: Mapping[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """The blocks of one output, in the richest form that a page can show."""
    html = data.get("text/html", "")
    html = "" if html.startswith("<pre") else html  # printed lines, which are text as well
    if svg := data.get("image/svg+xml"):
        yield _picture(svg.encode(), "svg", name, pictures)
    elif png := data.get("image/png"):
        yield _picture(base64.b64decode(png), "png", name, pictures)
    elif frames := frames_of(html):
        yield _picture(moving(frames), "png", name, pictures)
    elif html:
        yield "\n".join(line for line in html.splitlines() if line.strip())
    else:
        lines = re.split(r"\r*\n", COLORS.sub("", data["text/plain"]))  # a terminal ends with both
        plain = [line.rpartition("\r")[2].rstrip() for line in lines]
        yield "```text\n" + "\n".join(plain).strip("\n") + "\n```"


def _picture(content: bytes, kind: str, name: str, pictures: dict[str, bytes]) -> str:
    """Keeps a picture and returns the block that shows it."""
    file = f"{name}_{len(pictures) + 1}.{kind}"
    pictures[file] = content
    return f"![What the cell draws]({file})"


# ---- an animation of matplotlib's, which needs a script to play --------------------------------


def frames_of(html: str) -> list[bytes]:
    """The PNG frames in what `Animation.to_jshtml` returns; none in other HTML."""
    found = re.findall(r'frames\[\d+\] = "data:image/png;base64,([^"]+)"', html)
    return [base64.b64decode(each.replace("\\\n", "")) for each in found]


def moving(frames: list[bytes]) -> bytes:
    """An animated PNG of frames, played again and again, on a transparent background."""
    first, *rest = [_transparent(each) for each in frames]
    out = io.BytesIO()
    style = {"duration": MILLISECONDS, "loop": 0, "disposal": 1}
    first.save(out, format="PNG", save_all=True, append_images=rest, **style)
    return out.getvalue()


def _transparent(frame: bytes) -> Any:
    """The image of a frame without the white that matplotlib puts behind it.

    Each pixel between white and the color of lines and text has that color, and covers in part.
    """
    from PIL import Image  # comes with matplotlib

    pixels = np.array(Image.open(io.BytesIO(frame)).convert("RGBA"))
    ink = np.array([int(INK[i : i + 2], 16) for i in (1, 3, 5)])
    missing = 255 - pixels[..., :3].astype(int)
    share = missing[..., 0] / (255 - ink[0])
    between = (abs(missing - share[..., None] * (255 - ink)) < 6).all(-1) & (share < 1.03)
    pixels[between, :3] = ink
    pixels[between, 3] = np.clip(255 * share[between], 0, 255)
    return Image.fromarray(pixels)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs notebooks and writes them as pages of the documentation."""
    parser = Parser(prog="python docs/tutorial_pages.py", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 1_quickstart (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "tutorials", help="where to")
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in NOTEBOOKS:
            raise UserError(f"no notebook {name}; there are {', '.join(NOTEBOOKS)}")
    for name in options.names or NOTEBOOKS:
        write(name, options.out)
        print(options.out / f"{name}.md")
    return 0


if __name__ == "__main__":
    run_command(main)
