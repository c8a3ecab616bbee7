"""Fields in which two configs differ, as options of a command line."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jaxptd.config import Config


def changed_fields(before: Config, after: Config) -> Iterator[tuple[str, str]]:
    """Yields `section.field` and its new value as text, for each field that differs."""
    for section in dataclasses.fields(Config):
        old, new = getattr(before, section.name), getattr(after, section.name)
        for field in dataclasses.fields(new):
            value = getattr(new, field.name)
            if value != getattr(old, field.name):
                yield f"{section.name}.{field.name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value).replace(" ", "")
