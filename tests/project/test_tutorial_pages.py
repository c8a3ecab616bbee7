"""Tutorial pages match the current notebooks, with their outputs and pictures."""

import base64
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import pytest
from PIL import Image

from docs.tutorial_pages import BEGIN, NOTEBOOKS, ROOT, main, page, without_outputs
from jaxptd.errors import UserError

PAGES = ROOT / "docs" / "tutorials"

each = pytest.mark.parametrize("name", NOTEBOOKS)


def is_current(name: str, text: str) -> bool:
    """True if the page contains the notebook's words and code."""
    return without_outputs(text) == page(jupytext.read(NOTEBOOKS[name]), name)[0]


@each
def test_a_page_is_its_notebook(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert is_current(name, text), f"make tutorials ARGS={name}"
    assert text.count(BEGIN) > 3 and "```text\n\n```" not in text  # no output is empty
    assert not is_current(name, text.replace("jaxptd.", "jaxptd .", 1))


def test_every_picture_is_shown() -> None:
    texts = [(PAGES / f"{name}.md").read_text() for name in NOTEBOOKS]
    shown = [file for text in texts for file in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)]
    pages = [f"{name}.md" for name in NOTEBOOKS]
    assert sorted(path.name for path in PAGES.iterdir()) == sorted(shown + pages)


@each
def test_a_page_tells_nothing_of_the_machine_and_loads_nothing(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|home|root|work|Users)/", text)
    assert not re.search(r"<(script|link|iframe)", text)


# ---- outputs ------------------------------------------------------------------------------------


def cell(*outputs: Any, source: str = "f()", title: str = "") -> Any:
    return SimpleNamespace(
        cell_type="code", source=source, outputs=outputs, metadata={"title": title}
    )


def printed(text: str, name: str = "stdout") -> Any:
    return SimpleNamespace(output_type="stream", name=name, text=text)


def shown(**data: str) -> Any:
    kinds = {"svg": "image/svg+xml", "png": "image/png", "html": "text/html", "plain": "text/plain"}
    return SimpleNamespace(
        output_type="display_data", data={kinds[kind]: value for kind, value in data.items()}
    )


def made(*cells: Any) -> tuple[str, dict[str, bytes]]:
    return page(SimpleNamespace(cells=cells), "n")


def test_printed_text_is_joined_and_has_neither_colors_nor_warnings() -> None:
    outputs = printed("a\x1b[31mb"), printed("c \n"), printed("bad", "stderr"), printed("1\r2\n")
    text, pictures = made(cell(*outputs, title="A title."))
    assert "A title.\n\n```py\nf()\n```\n\n" in text and "```text\nabc\n2\n```" in text
    assert not pictures and "bad" not in text
    text, _ = made(cell(printed("50 %\r100 %\r\nwords\r\n\r\nend\r\n"), source="!command"))
    assert "```text\n100 %\nwords\n\nend\n```" in text


def test_the_richest_form_of_an_output_is_shown() -> None:
    text, pictures = made(
        cell(shown(svg="<svg/>", html="<b>", plain="p")),
        cell(shown(html="<table>\n\n</table>", plain="p")),
        cell(shown(html="<pre>q</pre>", plain="q")),
    )
    assert pictures == {"n_1.svg": b"<svg/>"}
    assert "](n_1.svg)" in text and "<table>\n</table>" in text and "```text\nq\n```" in text
    assert without_outputs(text) == made(cell(), cell(), cell())[0]


def test_an_animation_becomes_a_moving_picture() -> None:
    frames = []
    for color in ("white", "blue"):
        out = io.BytesIO()
        Image.new("RGB", (2, 2), color).save(out, "PNG")
        frames.append(base64.b64encode(out.getvalue()).decode())
    script = "\n".join(
        f'frames[{i}] = "data:image/png;base64,{x[:20]}\\\n{x[20:]}"' for i, x in enumerate(frames)
    )
    text, pictures = made(cell(shown(html=f"<script>{script}</script>", plain="p")))
    assert "script" not in text
    image: Any = Image.open(io.BytesIO(pictures["n_1.png"]))
    assert image.n_frames == 2
    assert image.convert("RGBA").getpixel((0, 0))[3] == 0  # white glares on a dark page
    image.seek(1)
    assert image.convert("RGBA").getpixel((0, 0)) == (0, 0, 255, 255)


def test_links_between_notebooks_lead_to_pages() -> None:
    words = SimpleNamespace(cell_type="markdown", source="[a](2_b.py), [c](https://d.e/f.py)")
    assert "[a](2_b.md), [c](https://d.e/f.py)" in made(words)[0]


def test_a_name_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no notebook 9_nine; there are 1_quickstart, "):
        main(["9_nine", "--out", str(tmp_path)])
