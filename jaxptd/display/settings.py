"""Settings, which are frozen dataclasses, by the fields that are not at their defaults."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxptd.display.tables import Table, html_of

WIDTH = 88  # columns; longer texts have a line for each field


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
    title = f"{type(settings).__name__}; other fields have their defaults"
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
