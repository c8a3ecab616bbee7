"""Short text and HTML of the package's results, for a terminal and a notebook."""

import dataclasses
import html
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import rich.table
from rich.text import Text

# ---- numbers with units --------------------------------------------------------------------------

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6))


def bytes_text(size: float) -> str:
    """Writes bytes with a decimal unit.

    >>> bytes_text(80_000_000_000), bytes_text(12)
    ('80.0 GB', '12 bytes')
    """
    return _scaled(size, _BYTES, 1) or f"{size:.0f} bytes"


def gib_text(size: float) -> str:
    """Writes bytes in GiB, the unit of tables of memory.

    >>> gib_text(2**37)
    '128.0 GiB'
    """
    return f"{size / 2**30:.1f} GiB"


def count_text(number: float) -> str:
    """Writes a number of parameters or tokens.

    >>> count_text(1_848_000), count_text(2e12), count_text(257)
    ('1.85 M', '2.00 T', '257')
    """
    return _scaled(number, _COUNTS, 2) or f"{number:.0f}"


def _scaled(number: float, units: Sequence[tuple[str, float]], digits: int) -> str | None:
    fitting = ((unit, size) for unit, size in units if abs(number) >= size)
    unit, size = next(fitting, ("", 0.0))
    return f"{number / size:.{digits}f} {unit}" if unit else None


# ---- tables as text and as HTML ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, names of columns, and rows.

    Args:
        title: a line above the table.
        columns: their names.
        rows: one value per column; columns of numbers are aligned to the right.

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
    """Joins texts, each as a paragraph, and tables to HTML."""
    pieces = (x._repr_html_() if isinstance(x, Table) else f"<p>{_escaped(x)}</p>" for x in parts)
    return f"<div>{''.join(pieces)}</div>"


def preformatted(text: str) -> str:
    """HTML of a text that keeps its lines and spaces."""
    return f"<pre>{_escaped(text)}</pre>"


def _escaped(value: Any) -> str:
    return html.escape(_text(value)).replace("\n", "<br>")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


# ---- settings, by the fields that are not at their defaults --------------------------------------

WIDTH = 88  # columns; longer texts get a line per field


def settings_text(settings: Any) -> str:
    """The expression that makes these settings; the `__repr__` of a section of a config."""
    name = type(settings).__name__
    changed = dict(_changed(settings))
    nested = any(map(dataclasses.is_dataclass, changed.values()))
    fields = [f"{field}={_expression(value)}" for field, value in changed.items()]
    line = f"{name}({', '.join(fields)})"
    if not nested or len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {field},\n" for field in fields) + ")"


def settings_html(settings: Any) -> str:
    """A table of the fields that are not at their defaults, for a notebook."""
    rows = list(_rows("", settings))
    if not rows:
        return html_of(f"{type(settings).__name__}: every field has its default")
    title = f"{type(settings).__name__}; all other fields have their defaults"
    return Table(title, ("field", "value"), rows)._repr_html_()


def _expression(value: Any) -> str:
    return settings_text(value) if dataclasses.is_dataclass(value) else repr(value)


def _changed(settings: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the fields that are not at their defaults."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != _default(field):
            yield field.name, value


def _rows(prefix: str, settings: Any) -> Iterator[tuple[str, str]]:
    for name, value in _changed(settings):
        if dataclasses.is_dataclass(value):
            yield from _rows(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", repr(value) if isinstance(value, str) else str(value)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# ---- modules that share a name with their function -----------------------------------------------

# `jaxptd.train` has to be both a module, for `python -m jaxptd.train`, and a function. Python sets
# the package's attribute `train` to the module whenever something imports `jaxptd.train`, so a
# function of that name would disappear at the first such import. A callable module is both, in any
# order of imports.


class _CallableModule(types.ModuleType):
    """A module that is called as its function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))


def callable_module(name: str) -> None:
    """Makes the module of this name call its function: in `jaxptd.verify` the function `verify`."""
    sys.modules[name].__class__ = _CallableModule


def _function(module: types.ModuleType) -> Any:
    return getattr(module, module.__name__.rpartition(".")[2])
