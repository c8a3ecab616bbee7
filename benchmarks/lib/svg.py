"""SVG pictures for the documentation, with the same bytes each time. Needs the viz extra."""

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxptd.errors import Parser


def command(
    draw: Callable[[Path], None], module: str, words: str | None, argv: Sequence[str] | None
) -> int:
    """Runs `python -m benchmarks.<module> [--out docs/pictures]`; words: its description."""
    parser = Parser(prog=f"python -m benchmarks.{module}", description=words)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="where to")
    draw(parser.parse_args(argv).out)
    return 0
