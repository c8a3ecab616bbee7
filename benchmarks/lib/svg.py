"""SVG pictures for the documentation, with the same bytes each time. Needs the viz extra."""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from jaxptd.errors import Parser


def command(
    draw: Callable[[Path], None], module: str, words: str | None, argv: Sequence[str] | None
) -> int:
    """Runs `python -m benchmarks.<module> [--out docs/pictures]`; words: its description."""
    parser = Parser(prog=f"python -m benchmarks.{module}", description=words)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="where to")
    draw(parser.parse_args(argv).out)
    return 0


def words(path: Path) -> list[str]:
    """The texts of a picture, in the order in which they are drawn."""
    texts = (each for each in ElementTree.parse(path).iter() if each.tag.endswith("}text"))
    return ["".join(each.itertext()).strip() for each in texts]
