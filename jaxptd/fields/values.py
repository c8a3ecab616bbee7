"""Converts a value to the type of its field, one of the types that configs have.

These are `bool`, `int`, `float`, `str`, `Literal`, lists, tuples and dicts of them, unions, and
classes.
"""

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxptd.errors import quoted
from jaxptd.stores import is_url

LIMIT = 2**31  # JAX counts steps, tokens and the elements of a dim in int32
LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes, as Linux allows
ADDRESS = re.compile(r"\s*([\w.+@-]{2,}):/")  # URLs of a bucket, a server or another host
# Variables, which other programs' config files and shells replace by their values.
VARIABLE = re.compile(r"\$\{[^}]*\}?|\$\([^)]*\)?|\{\{.*?(?:\}\}|$)|\$[A-Z_][A-Z0-9_]*(?!\w)")


# Values that user code adds to a `Literal` type, such as its own model families.
_ADDED: dict[Any, tuple[str, ...]] = {}


def add_value(kind: Any, value: str) -> None:
    """Allows one more value for fields of a `Literal` type."""
    _ADDED[kind] = (*_ADDED.get(kind, ()), value)


def literals(kind: Any) -> tuple[Any, ...]:
    """The values of a `Literal` type."""
    return (*typing.get_args(kind), *_ADDED.get(kind, ()))


UNIONS = (types.UnionType, typing.Union)  # `int | None`, `Literal["a"] | None`


@dataclasses.dataclass(frozen=True)
class Rules:
    """Limits of a field's values, besides its type.

    Args:
        below: limit for the magnitude of numbers. Non-finite numbers pass if the field is a float.
        paths: texts are paths, or names that may also be paths.
        stores: they may also be URLs in a store, such as s3://bucket/run.
        sections: a dict stands for a dataclass, which the field's owner makes from it.
    """

    below: float = LIMIT
    paths: bool = True
    stores: bool = False
    sections: bool = False


PATHS = Rules()


class OtherTypeError(TypeError):
    """The value has another type than its field."""


class ImpossibleError(ValueError):
    """The value has its field's type, but no field can have it. The message is the remedy."""


def convert(value: Any, kind: Any, rules: Rules = PATHS) -> Any:
    """Converts a value to the type of its field.

    numpy numbers become Python's, whole numbers become floats where the field is a float, and paths
    become text. A leading `~` is expanded to the home directory.

    Args:
        value: anything.
        kind: the field's annotation.
        rules: what else the field requires.

    Raises:
        OtherTypeError: the value has another type.
        ImpossibleError: the number is too large, or the text cannot be a local path.
    """
    members, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in UNIONS:
        return _first(value, members, rules)
    if origin is typing.Literal:
        return _choice(value, literals(kind))
    if origin in (list, tuple):
        return origin(convert(item, members[0], rules) for item in _items(value))
    if origin is dict:
        return _dict(value, members, rules)
    if kind in (int, float):
        number = _number(value) if kind is float else _whole_number(value)
        return kind(_within(number, rules.below))
    if kind is str:
        return _text(value, rules)
    if rules.sections and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return value
    return bool(_instance(value, bool | np.bool_)) if kind is bool else _instance(value, kind)


def describe(kind: Any) -> str:
    """Describes a type: "a whole number or null"."""
    members, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in UNIONS:
        return " or ".join(map(describe, members))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, literals(kind)))}"
    if origin in (list, tuple):
        return f"a list, each item {describe(members[0])}"
    if origin is dict:
        return f"a dict from {describe(members[0])} to {describe(members[1])}"
    if kind in _WORDS:
        return _WORDS[kind]
    name = kind.__name__.rpartition(".")[2]  # "jaxlib._jax.Array" before JAX 0.11
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        types.NoneType: "null",
        np.ndarray: "a NumPy array",
    }
)


def _first(value: Any, kinds: Sequence[Any], rules: Rules) -> Any:
    """Converts the value to the first of these types that it has."""
    for kind in kinds:
        try:
            return convert(value, kind, rules)
        except OtherTypeError:
            continue
    raise OtherTypeError


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    for choice in choices:
        if isinstance(plain, type(choice)) and not isinstance(plain, bool) and plain == choice:
            return choice
    raise OtherTypeError


def _items(value: Any) -> Sequence[Any]:
    items = value.tolist() if isinstance(value, np.ndarray) else value
    return _instance(items, list | tuple)


def _dict(value: Any, kinds: Sequence[Any], rules: Rules) -> dict[Any, Any]:
    key_kind, kind = kinds
    result: dict[Any, Any] = {}
    for key, item in _instance(value, dict).items():
        name = convert(key, key_kind, rules)
        if name in result:
            raise ImpossibleError(f"{quoted(name)} is given twice; give it once")
        result[name] = convert(item, kind, rules)
    return result


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise OtherTypeError
    return value


# ---- numbers ------------------------------------------------------------------------------------


def _whole_number(value: Any) -> int:
    if isinstance(value, bool):
        raise OtherTypeError
    return int(_instance(value, numbers.Integral))  # numpy's numbers are registered as such


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float | np.floating) else _whole_number(value)


def _within(number: float, below: float) -> float:
    if below <= abs(number) != math.inf:
        side = f"below {below}" if number > 0 else f"above {-below}"
        raise ImpossibleError(f"use a number {side}")
    return number


# ---- texts --------------------------------------------------------------------------------------


def _text(value: Any, rules: Rules) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    text = str.__str__(_instance(path, str))  # a plain str from a numpy.str_
    if "\0" in text:
        raise ImpossibleError("it has a null byte; remove it")
    try:
        names = text.encode().split(b"/")
    except UnicodeEncodeError as error:
        raise ImpossibleError("it is not valid Unicode; use text or a path that is") from error
    if max(map(len, names)) > LONGEST_NAME or len(b"/".join(names)) > LONGEST_PATH:
        raise ImpossibleError(
            f"no path is so long; use at most {LONGEST_PATH} bytes, {LONGEST_NAME} for each name"
        )
    if variable := VARIABLE.search(text):
        raise ImpossibleError(
            f"{quoted(variable[0])} is not expanded here; write the value out, or give the option "
            'in a shell, which expands "$NAME"'
        )
    if not rules.paths or (rules.stores and is_url(text) and not text.lower().startswith("file:")):
        return text
    return _local(text)


def _local(path: str) -> str:
    """The path with `~` expanded. Raises ImpossibleError for an address, such as a bucket's."""
    if address := ADDRESS.match(path):
        raise ImpossibleError(
            f"{quoted(path)} is an address, not a path; "
            f"{_path_of(address[1], path[address.end() :])}"
        )
    return _in_home(path) if path.startswith("~") else path


def _path_of(scheme: str, rest: str) -> str:
    """The remedy for an address."""
    if scheme.lower() == "file":
        return f"write the path, {quoted('/' + rest.removeprefix('/').lstrip('/'))}"
    return "jaxptd reads and writes only local files here: copy it, or mount it as a folder"


def _in_home(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded == path:  # expanduser left it unchanged
        raise ImpossibleError(
            f"there is no home directory {path.partition('/')[0]}; write the path out"
        )
    return expanded
