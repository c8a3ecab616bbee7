"""Runs the notebooks and writes them as pages of the documentation, with output and pictures.

`python -m benchmarks.tutorials [NAME ...] [--out docs/tutorials]`, or `make tutorials`, which takes
four minutes on two cores. Needs the notebooks, viz and hf extras. Building the documentation then
runs nothing. `test_pages.py` fails for a page whose notebook has changed.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tutorials.pages import page
from jaxptd.errors import Parser, UserError, run_command

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.py"))}
# Run before the first cell, and not shown: pictures are drawings in the style of the pages. Text
# within axes is on fills.
STYLE = """
import matplotlib
from matplotlib_inline.backend_inline import set_matplotlib_formats
from jaxptd.plot.colors import DARK, INK
from jaxptd.plot.style import STYLE
%matplotlib inline
set_matplotlib_formats("svg")
matplotlib.rcParams.update(STYLE | {"text.color": DARK, "legend.labelcolor": INK})
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs notebooks and writes them as pages of the documentation."""
    parser = Parser(prog="python -m benchmarks.tutorials", description=main.__doc__)
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
