"""Pages of results and the command lines that make them: what every benchmark shares.

The words of a page are written by hand, in `benchmarks/results/`. A command makes its tables: it
appends a section, or makes every table of a page anew (`renew`).
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


OUT = "Markdown file to write, or to append to"


def parser(module: str, main: Callable[..., Any], *, config: bool = False, out: str = OUT) -> Any:
    """The parser of `python -m benchmarks.MODULE`, with `--out`; config: and a config's fields."""
    name, about = f"python -m benchmarks.{module}", main.__doc__ or ""
    made: Any = make_parser(name, about) if config else Parser(prog=name, description=about)
    made.add_argument("--out", default="", help=out)
    return made


def printed(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """All rows; each is printed as soon as it is made."""
    found = []
    for row in rows:
        print("  ".join(row), flush=True)
        found.append(row)
    return found


def joined(*blocks: str) -> str:
    """Blocks of a page, those that are empty left out."""
    return "\n\n".join(filter(None, blocks)) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a file aside and moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(path.suffix + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def head(title: str, command: str) -> str:
    """The first lines of a page."""
    return f"# {title}\n\nMade by `python -m benchmarks.{command}`.\n\n"


def append(out: str, introduction: str, section: str) -> None:
    """Appends a section to a page, or to what begins a new one; out: its path, or nothing."""
    if out:
        last_section(Path(out), introduction)(section)


def last_section(path: Path, introduction: str) -> Callable[[str], None]:
    """A function that appends a section, and when called again writes it anew.

    So a run that takes long can write what it has after each row.
    """
    before = path.read_text(encoding="utf-8") + "\n" if path.exists() else introduction
    return lambda section: write(path, before + section)


def renew(path: Path, text: str) -> None:
    """Writes a page. One that is there keeps its words: tables and line of versions are made anew.

    Raises:
        UserError: it has another number of tables.
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
