"""The documentation's pictures: legible at page width, on light and dark backgrounds."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = sorted((Path(__file__).parents[2] / "docs" / "pictures").glob("*.svg"))
PAGE = 736  # width of a page's text in pixels
SMALLEST = 8.0  # height of a letter in pixels at that width
PIXELS = {"pt": 4 / 3, "px": 1.0, "": 1.0}
WHITE = ("#fff", "#ffffff", "white")

each = pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)


def scale(source: str) -> float:
    """Pixels on the page for one unit of an SVG."""
    number, unit = re.search(r'<svg[^>]* width="([\d.]+)(\w*)"', source).groups()  # type: ignore[union-attr]
    wide = float(number) * PIXELS[unit]
    units = float(re.search(r'viewBox="\S+ \S+ ([\d.]+)', source)[1])  # type: ignore[index]
    return min(wide, PAGE) / units


def letters(source: str) -> list[float]:
    """Sizes of all letters, in units of the SVG."""
    return [float(size) for size in re.findall(r"font(?:-size)?:[^;\"}]*?([\d.]+)px", source)]


def cards(source: str) -> list[str]:
    """Tags of white shapes that cover most of the picture."""
    tree = ElementTree.fromstring(source)
    _, _, wide, high = (float(x) for x in tree.attrib["viewBox"].split())
    found = []
    for shape in tree.iter():
        style = shape.get("style", "") + f";fill: {shape.get('fill', '')}"
        if not any(f"fill: {white}" in style for white in WHITE):
            continue
        numbers = [float(x) for x in re.findall(r"-?[\d.]+", shape.get("d", ""))]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=False)) if numbers else []
        across = max((x for x, _ in pairs), default=float(shape.get("width", 0)))
        down = max((y for _, y in pairs), default=float(shape.get("height", 0)))
        if across > 0.5 * wide and down > 0.5 * high:
            found.append(shape.tag)
    return found


@each
def test_a_picture_has_no_white_card(path: Path) -> None:
    assert cards(path.read_text(encoding="utf-8")) == []


@each
def test_its_letters_can_be_read_at_the_width_of_a_page(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    sizes = letters(source)
    assert sizes
    assert min(sizes) * scale(source) >= SMALLEST


def test_a_card_and_small_letters_are_found() -> None:
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1472 100" width="1472" height="9">'
    card = f'{head}<rect width="1472" height="100" fill="white"/></svg>'
    path = f'{head}<path d="M 0 100 L 1472 100 L 1472 0 z" style="fill: #ffffff"/></svg>'
    line = f'{head}<path d="M 0 9 L 1472 9" style="fill: #ffffff"/></svg>'
    assert [len(cards(source)) for source in (card, path, line)] == [1, 1, 0]
    small = f'{head}<text style="font: 12px sans-serif">a</text></svg>'
    assert letters(small) == [12] and scale(small) == 0.5
