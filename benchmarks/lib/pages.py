"""Pages of results and the commands that make them: what every benchmark shares.

The text of a page in `benchmarks/results/` is written by hand. A command makes its tables: it
appends a section, or rewrites every table of a page (`renew`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxptd.commands.command_line import make_parser
from jaxptd.errors import Parser, UserError

RESULTS = Path(__file__).parents[1] / "results"
TABLE = re.compile(r"^\|.*(?:\n\|.*)*", re.M)
VERSIONS = re.compile(r"\d{4}-\d\d-\d\d; Python [^;\n]*; \d+ CPU cores, \w+\.")


OUT = "Markdown file to write or append to"


def parser(module: str, main: Callable[..., Any], *, config: bool = False, out: str = OUT) -> Any:
    """The parser of `python -m benchmarks.MODULE`, with `--out`; config: with config fields."""
    name, about = f"python -m benchmarks.{module}", main.__doc__ or ""
    made: Any = make_parser(name, about) if config else Parser(prog=name, description=about)
    made.add_argument("--out", default="", help=out)
    return made


def printed(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Returns all rows, and prints each as soon as it is made."""
    found = []
    for row in rows:
        print("  ".join(row), flush=True)
        found.append(row)
    return found


def joined(*blocks: str) -> str:
    """Joins the blocks of a page, leaving out empty ones."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a file under a temporary name and moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(path.suffix + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def head(title: str, command: str) -> str:
    """The first lines of a page."""
    return f"# {title}\n\nMade by `python -m benchmarks.{command}`.\n\n"


def append(out: str, introduction: str, section: str) -> None:
    """Appends a section to a page, to an introduction if it is new; out: its path, or empty."""
    if out:
        last_section(Path(out), introduction)(section)


def last_section(path: Path, introduction: str) -> Callable[[str], None]:
    """A function that appends a section, and replaces it when called again.

    A long run can therefore write what it has after each row.
    """
    before = path.read_text(encoding="utf-8") + "\n" if path.exists() else introduction
    return lambda section: write(path, before + section)


def renew(path: Path, text: str) -> None:
    """Writes a page. An existing page keeps its text: only tables and versions are replaced.

    Raises:
        UserError: the page has a different number of tables.
    """
    if path.exists():
        old, new = path.read_text(encoding="utf-8"), TABLE.findall(text)
        if (number := len(TABLE.findall(old))) != len(new):
            raise UserError(f"{path} has {number} tables, not {len(new)}; write to another folder")
        today = VERSIONS.search(text)
        old = VERSIONS.sub(today[0], old, count=1) if today else old
        text = TABLE.sub(lambda _: new.pop(0), old)
    write(path, text)


# ---- cells --------------------------------------------------------------------------------------


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
