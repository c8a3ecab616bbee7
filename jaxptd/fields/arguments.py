"""Checks the arguments of the functions that `import jaxptd` exports, against their annotations.

Functions that a step calls, or that JAX traces, stay without: a check takes microseconds.
"""

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from jaxptd.errors import ArgumentError, UserError, did_you_mean, quoted
from jaxptd.fields.remedies import remedy
from jaxptd.fields.values import UNIONS, ImpossibleError, OtherTypeError, Rules, convert, describe

P = ParamSpec("P")
R = TypeVar("R")

LIMIT = 2**63  # numpy counts in int64
NO_KINDS = (inspect.Parameter.empty, Any)
WORDS = {types.NoneType: "None", bool: "True or False", Path: "a path"}
ORIGINS = {collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}


def checked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check and convert its arguments before it runs.

    Numbers and choices are converted as fields of configs are, also numpy's; `str | Path` and
    `Path` become a Path, with `~` expanded; any other `str` is a text, and stays as it is. An
    annotation in quotes is the name of a class.

    >>> @checked("jaxptd.half")
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half(np.int64(3))
    1.5
    >>> half("3")
    Traceback (most recent call last):
    jaxptd.errors.messages.UserError: jaxptd.half: number is '3'; expected a number

    Args:
        name: of the function, for messages.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, run = inspect.signature(function), _any_arguments(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                known = [each for each in signature.parameters if each != "self"]
                refuse_unknown(name, kwargs, known, see=f"its arguments are {', '.join(known)}")
                raise ArgumentError(f"{name}: {error}; see help({name})") from error
            for key, value in given.arguments.items():
                kind = signature.parameters[key].annotation
                given.arguments[key] = check_argument(name, key, value, kind)
            return run(*given.args, **given.kwargs)

        return call

    return decorate


def refuse_unknown(what: str, given: Iterable[str], known: Collection[str], see: str) -> None:
    """Raises ArgumentError for the first name that is not known.

    Args:
        what: the function or class, for the message.
        given: names of arguments.
        known: those that there are.
        see: the remedy if none is like it.
    """
    for name in given:
        if name not in known:
            remedy = did_you_mean(name, known, otherwise=see)
            raise ArgumentError(f"{what} has no argument {quoted(name)}; {remedy}")


def _any_arguments(function: Callable[..., R]) -> Callable[..., R]:
    return function


def check_argument(function: str, name: str, value: Any, kind: Any) -> Any:
    """Converts an argument to the type that its annotation names.

    Raises:
        UserError: it is of another type, or impossible.
    """
    if typing.get_origin(kind) is collections.abc.Sequence and isinstance(value, list | tuple):
        (of,) = typing.get_args(kind)
        return [check_argument(function, f"{name}[{i}]", x, of) for i, x in enumerate(value)]
    try:
        return _convert(value, kind)
    except OtherTypeError as error:
        how = remedy(value, _names(kind))
        words = f"expected {_describe(kind)}" + (f": {how}" if how else "")
        raise UserError(f"{function}: {name} is {_shown(value)}; {words}") from error
    except ImpossibleError as error:
        raise UserError(f"{function}: {name} is {_shown(value)}; {error}") from error


def check_range(function: str, name: str, value: int, *, least: int, most: int = LIMIT - 1) -> None:
    """Raises UserError for a number outside `least` to `most`."""
    if not least <= value <= most:
        limits = f"{least} or more" if most == LIMIT - 1 else f"{least} to {most}"
        raise UserError(f"{function}: {name} is {value}; use {limits}")


# ---- conversion ---------------------------------------------------------------------------------


def _convert(value: Any, kind: Any) -> Any:
    members, origin = typing.get_args(kind), typing.get_origin(kind)
    if kind in NO_KINDS:
        return value
    if origin in UNIONS:
        return _first(value, [Path if k is str and Path in members else k for k in members])
    if origin is collections.abc.Sequence:
        return [_convert(item, members[0]) for item in _items(value)]
    if kind is Path:
        return Path(convert(value, str))
    if isinstance(kind, str) or kind is str or origin in ORIGINS:
        return _instance(value, kind, origin)
    return convert(value, kind, Rules(below=LIMIT))


def _first(value: Any, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return _convert(value, kind)
        except OtherTypeError:
            continue
    raise OtherTypeError


def _items(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise OtherTypeError
    return list(value)


def _instance(value: Any, kind: Any, origin: Any) -> Any:
    """The value, if it is of this class, or of a class of this name."""
    if isinstance(kind, str):
        right = kind in {each.__name__ for each in type(value).__mro__}
    else:
        right = isinstance(value, origin or kind)
    if not right:
        raise OtherTypeError
    return value


# ---- words --------------------------------------------------------------------------------------


def _describe(kind: Any) -> str:
    members, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in UNIONS:
        kinds = [each for each in members if not (each is str and Path in members)]
        return " or ".join(dict.fromkeys(map(_describe, kinds)))
    if origin is collections.abc.Sequence:
        return f"a list, each of them {_describe(members[0])}"
    if kind in WORDS or origin in ORIGINS:
        return WORDS.get(kind) or ORIGINS[origin]
    if isinstance(kind, str) or (isinstance(kind, type) and kind not in (int, float, str)):
        return _with_article(*_names(kind))
    return describe(kind)


def _names(kind: Any) -> list[str]:
    """The names of the classes that an annotation allows."""
    if typing.get_origin(kind) in UNIONS:
        return [name for each in typing.get_args(kind) for name in _names(each)]
    return [kind if isinstance(kind, str) else getattr(kind, "__name__", "")]


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, numbers.Number | str | bytes)
    return quoted(repr(value)) if plain else _with_article(type(value).__name__)
