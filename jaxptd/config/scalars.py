"""Refuses words of YAML that mean something else there than to most people: 0123, 1:30, yes.

Configs are read as YAML 1.1, in which 0123 is 83 (octal), 1:30 is 90 (base 60), and yes is true.
"""

import re
import typing
from typing import Any

import yaml

from jaxptd.errors import UserError, quoted
from jaxptd.fields.values import UNIONS

Kinds = tuple[Any, ...]
LEADING_ZERO = re.compile(r"([-+]?)0([\d_]*\d[\d_]*)")
BASE_60 = re.compile(r"[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?")
# A float for jsonargparse, a text for PyYAML.
EXPONENT = re.compile(r"[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+")
NOT_TEXTS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))


class Dumper(yaml.SafeDumper):
    """Writes texts in quotes that `check_scalars` would refuse without."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))


def check_scalars(where: str, node: yaml.Node | None, kind: Any, *, option: bool = False) -> None:
    """Raises UserError for a value that YAML reads as another one than stands there.

    Args:
        where: the field, and its file or option, for the message.
        node: of the value; its tags are those of `yaml.SafeLoader`.
        kind: the field's annotation.
        option: the value is an option's, whose text is taken as it is if the field has a text.
    """
    _check(where, node, _members(kind), option=option)


def _check(where: str, node: yaml.Node | None, kinds: Kinds, *, option: bool = False) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(where, item, _parts(kinds, (list, tuple), 0))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _check(where, key, _parts(kinds, (dict,), 0))
            _check(where, value, _parts(kinds, (dict,), 1))
    elif isinstance(node, yaml.ScalarNode):
        choices = [x for each in kinds for x in typing.get_args(each) if isinstance(x, str)]
        if str not in kinds and not choices:
            _check_number(where, node.value)
        elif not option and not node.style:
            _check_text(where, node, choices)


def _members(kind: Any) -> Kinds:
    return typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)


def _parts(kinds: Kinds, origins: tuple[type, ...], position: int) -> Kinds:
    """The kinds of the items, keys or values of collections of these kinds."""
    found = [typing.get_args(each) for each in kinds if typing.get_origin(each) in origins]
    return tuple(part for each in found for part in _members(each[position]))


def _check_number(where: str, text: str) -> None:
    if match := LEADING_ZERO.fullmatch(text):
        digits = match[2].replace("_", "").lstrip("0") or "0"
        octal = int(digits, 8) if set(digits) <= set("01234567") else None
        other = "" if octal is None or str(octal) == digits else f", or {match[1]}{octal} for octal"
        raise UserError(
            f"{where}: {quoted(text)} begins with 0, which some readers of YAML take for octal; "
            f"write {match[1]}{quoted(digits)}{other}"
        )
    if BASE_60.fullmatch(text):
        raise UserError(
            f"{where}: {quoted(text)} is a number of base 60 in YAML, {_base_60(text):.12g}; "
            "write it without colons"
        )


def _base_60(text: str) -> float:
    number = 0.0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        number = 60 * number + float(part)
    return -number if text.startswith("-") else number


def _check_text(where: str, node: yaml.ScalarNode, choices: list[str]) -> None:
    """Raises UserError for a number or a truth value where a text or a choice is expected."""
    if node.tag not in NOT_TEXTS and not EXPONENT.fullmatch(node.value):
        return
    text = quoted(node.value)
    if choices:
        raise UserError(f"{where}: expected one of {', '.join(choices)}, got {text}")
    raise UserError(
        f"{where}: {text} is {_words(node.tag)} in YAML unless it stands in quotes; write '{text}'"
    )


def _words(tag: str) -> str:
    return "true or false" if tag.endswith("bool") else "a number"
