"""Checks every field of a dataclass against its annotation."""

import dataclasses
import typing
from typing import Any

from jaxptd.errors import UserError, quoted
from jaxptd.fields.values import ImpossibleError, OtherTypeError, Rules, convert, describe


def check_fields(config: Any, section: str = "") -> None:
    """Converts each field of a frozen dataclass to its type; for its `__post_init__`.

    A field's metadata may have what `values.Rules` have: `below`, the limit of its numbers, and
    `paths`, false for texts that are no paths.

    Args:
        config: its annotations are those that `values.convert` knows.
        section: of the config, for messages.

    Raises:
        UserError: a value is of another type, a number is too large, or a text has a character or
            a length that no path has.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is field.default:  # it is of its type
            continue
        try:
            converted = convert(value, field.type, Rules(**field.metadata))
        except (OtherTypeError, ImpossibleError) as error:
            remedy = str(error) or f"use {describe(field.type)}"
            name = f"{section}.{field.name}" if section else field.name
            raise UserError(f"{name}={_shown(value, field.type)}: {remedy}") from error
        if converted is not value:
            object.__setattr__(config, field.name, converted)


def _shown(value: Any, kind: Any) -> str:
    """The value for a message; a text that is no choice is in quotes, to tell '4' from 4."""
    plain = not isinstance(value, str) or typing.get_origin(kind) is typing.Literal
    return quoted(value if plain else repr(value))
