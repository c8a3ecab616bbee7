"""Checks every field of a dataclass against its annotation."""

import dataclasses
import functools
import typing
from typing import Any, TypeVar

from jaxptd.errors import ArgumentError, UserError, did_you_mean, quoted
from jaxptd.fields.values import ImpossibleError, OtherTypeError, Rules, convert, describe

T = TypeVar("T")


def named_fields(cls: type[T]) -> type[T]:
    """Makes a dataclass say which of its fields a misspelt argument means, in one line.

    >>> @named_fields
    ... @dataclasses.dataclass
    ... class Engine:
    ...     cylinders: int = 4
    >>> Engine(cylinder=6)
    Traceback (most recent call last):
    jaxptd.errors.messages.ArgumentError: Engine has no field cylinder; did you mean cylinders?
    """
    make: Any = cls.__init__
    names = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @functools.wraps(make)
    def init(self: T, *args: Any, **values: Any) -> None:
        if not values.keys() <= names:
            unknown = next(name for name in values if name not in names)
            remedy = meant_field(cls, unknown, see=f"see help(jaxptd.{cls.__name__})")
            raise ArgumentError(f"{cls.__name__} has no field {quoted(unknown)}; {remedy}")
        make(self, *args, **values)

    changed: Any = cls
    changed.__init__ = init
    return cls


def meant_field(cls: Any, name: str, *, see: str) -> str:
    """The remedy for a name that is no field of a dataclass: `see` where none is like it."""
    fields = dataclasses.fields(cls)
    sections: dict[str, Any] = {each.name: each.type for each in fields}
    for section, kind in sections.items():
        if dataclasses.is_dataclass(kind) and name in {x.name for x in dataclasses.fields(kind)}:
            class_name = getattr(kind, "__name__", "")
            return f"it is a field of {section}: {section}={class_name}({name}=...)"
    known = [field.name for field in fields]
    return did_you_mean(name, known, otherwise=see)


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
