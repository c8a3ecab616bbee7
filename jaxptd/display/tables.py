"""Tables as text and as HTML; every value is escaped."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, names of columns, and rows.

    Args:
        title: a line above the table.
        columns: their names.
        rows: of values, as many as there are columns; a column of numbers is aligned to the right.

    >>> print(Table("sizes", ("part", "bytes"), [("state", 1200), ("batch", 64)]))
    sizes
    part   bytes
    state  1,200
    batch     64
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __str__(self) -> str:
        cells = [list(self.columns), *([_text(x) for x in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = self._right
        lines = [
            "  ".join(
                text.rjust(width) if number else text.ljust(width)
                for text, width, number in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines] if self.title else lines)

    def _repr_html_(self) -> str:
        styles = [f' style="text-align:{"right" if number else "left"}"' for number in self._right]

        def line(tag: str, row: Sequence[Any]) -> str:
            cells = zip(row, styles, strict=True)
            return "".join(f"<{tag}{style}>{_escaped(x)}</{tag}>" for x, style in cells)

        caption = f'<caption style="text-align:left">{_escaped(self.title)}</caption>' * bool(
            self.title
        )
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        head = f"<thead><tr>{line('th', self.columns)}</tr></thead>"
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>"

    def __rich__(self) -> rich.table.Table:
        """The table that a rich console prints."""
        table = rich.table.Table(title=self.title or None)
        for name, number in zip(self.columns, self._right, strict=True):
            table.add_column(Text(name), justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(Text(_text(x)) for x in row))
        return table

    @property
    def _right(self) -> list[bool]:
        """True for each column whose values are numbers, or empty."""
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        return [bool(column) and all(map(_is_number, column)) for column in map(list, columns)]


def html_of(*parts: Any) -> str:
    """Joins texts, each a paragraph, and tables to HTML."""
    made = (x._repr_html_() if isinstance(x, Table) else f"<p>{_escaped(x)}</p>" for x in parts)
    return f"<div>{''.join(made)}</div>"


def preformatted(text: str) -> str:
    """HTML of a text whose lines and spaces stay as they are."""
    return f"<pre>{_escaped(text)}</pre>"


def _escaped(value: Any) -> str:
    return html.escape(_text(value)).replace("\n", "<br>")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
