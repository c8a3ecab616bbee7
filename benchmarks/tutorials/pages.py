"""A notebook as a page in Markdown: its words, its code, and what its cells print and draw.

The page is MyST for Sphinx, and is read on a host of repositories too. Code is marked `py` and not
`python`: the tests of the pages run the latter, and a notebook runs as a whole.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tutorials.frames import frames_of, moving

BEGIN, END = "<!-- output -->", "<!-- end of output -->"
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # of a terminal
COMMAND = re.compile(r"^!", re.M)
NOTE = """<!-- `python -m benchmarks.tutorials` made this page of notebooks/{name}.py. -->

"""
SOURCE = """

This page is the notebook [{name}.py](../../notebooks/{name}.py), run on eight simulated devices.
"""


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
