"""Checks fields of dataclasses, and arguments of exported functions, against annotations."""

import collections.abc
import dataclasses
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
from jaxptd.fields.values import UNIONS, ImpossibleError, OtherTypeError, Rules, convert, describe
from jaxptd.stores import StorePath, is_url

# ---- where to get an object of the right class ---------------------------------------------------

# (given class, expected class) -> the remedy
PARTS = {
    ("Config", "Layout"): "pass config.layout",
    ("Config", "DataConfig"): "pass config.data",
    ("Config", "ModelConfig"): "pass config.model",
    ("Config", "Path"): "pass config.train.run_dir",
    ("Layout", "Mesh"): "pass jaxptd.make_mesh(layout)",
    ("Mesh", "Layout"): "pass the layout that the mesh was made from",
    ("list", "Run"): 'pass a run, or several by name: {"first": run}',
    ("Program", "Config"): "pass program.config",
    ("Run", "Config"): "pass run.config",
    ("Run", "Layout"): "pass run.config.layout",
    ("Run", "Program"): "pass run.program",
    ("Run", "Path"): "pass run.path",
}
# Expected class -> where to get one
SOURCES = {
    "Config": "jaxptd.load_config(name) reads one from a YAML file or a packaged config",
    "CommsReport": "jaxptd.comms(config) makes one",
    "DataConfig": "pass config.data",
    "Figure": "jaxptd.plot.mesh(layout) makes one, for example",
    "Layout": "jaxptd.Layout(tp=2), for example",
    "MemoryReport": "jaxptd.memory(config) makes one",
    "Mesh": "jaxptd.make_mesh(config.layout) makes one",
    "ProfileReport": "jaxptd.profile(config) makes one",
    "Program": "jaxptd.Program(config, jaxptd.make_mesh(config.layout)) makes one",
    "Run": "jaxptd.load(run_dir) gives one",
    "Samples": "pass run.data.train, for example",
    "Schedule": 'jaxptd.make_schedule("1f1b", stages=4, micro_batches=8), for example',
    "Tokenizer": 'jaxptd.load_tokenizer("bytes"), for example',
}


def remedy(value: Any, wanted: Sequence[str]) -> str:
    """The remedy for a value of none of these classes; empty if there is no hint."""
    given = type(value).__name__
    pairs = [PARTS[given, name] for name in wanted if (given, name) in PARTS]
    sources = [SOURCES[name] for name in wanted if name in SOURCES]
    return next(iter([*pairs, *sources]), "")


T = TypeVar("T")


def named_fields(cls: type[T]) -> type[T]:
    """Makes a dataclass suggest, in one line, the field that a misspelt argument means.

    >>> @named_fields
    ... @dataclasses.dataclass
    ... class Engine:
    ...     cylinders: int = 4
    >>> Engine(cylinder=6)
    Traceback (most recent call last):
    jaxptd.errors.ArgumentError: Engine has no field cylinder; did you mean cylinders?
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
    """The remedy for a name that is not a field of a dataclass: `see` if none is similar."""
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

    A field's metadata may have the keys of `values.Rules`: `below`, the limit of its numbers, and
    `paths`, false for texts that are not paths.

    Args:
        config: has annotations that `values.convert` knows.
        section: of the config, for messages.

    Raises:
        UserError: a value has the wrong type, a number is too large, or a text has a character or
            a length that no path can have.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is field.default:  # it already has its type
            continue
        try:
            converted = convert(value, field.type, Rules(**field.metadata))
        except (OtherTypeError, ImpossibleError) as error:
            remedy = str(error) or f"use {describe(field.type)}"
            name = f"{section}.{field.name}" if section else field.name
            raise UserError(f"{name}={_shown(value, field.type)}: {remedy}") from error
        if converted is not value:
            object.__setattr__(config, field.name, converted)


# ---- arguments of exported functions -------------------------------------------------------------

# Not for functions that a step calls or JAX traces: a check takes microseconds.


def _shown(value: Any, kind: Any) -> str:
    """The value for a message; text that is not a choice is quoted, to tell '4' from 4."""
    plain = not isinstance(value, str) or typing.get_origin(kind) is typing.Literal
    return quoted(value if plain else repr(value))


P = ParamSpec("P")
R = TypeVar("R")

LIMIT = 2**63  # numpy counts in int64
NO_KINDS = (inspect.Parameter.empty, Any)
WORDS = {
    types.NoneType: "None",
    bool: "True or False",
    Path: "a path",
    StorePath: "a URL",
}
ORIGINS = {collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}


def checked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check and convert its arguments before it runs.

    Numbers and choices, including numpy's, are converted like fields of configs; `str | Path` and
    `Path` become a Path with `~` expanded; any other `str` stays as it is. An annotation in quotes
    names a class.

    >>> @checked("jaxptd.half")
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half(np.int64(3))
    1.5
    >>> half("3")
    Traceback (most recent call last):
    jaxptd.errors.UserError: jaxptd.half: number is '3'; expected a number

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
        known: the names that exist.
        see: the remedy if none is similar.
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
        UserError: it has another type, or is impossible.
    """
    if typing.get_origin(kind) is collections.abc.Sequence and isinstance(value, list | tuple):
        (of,) = typing.get_args(kind)
        return [check_argument(function, f"{name}[{i}]", x, of) for i, x in enumerate(value)]
    try:
        return _convert(value, kind)
    except OtherTypeError as error:
        how = remedy(value, _names(kind))
        words = f"expected {_describe(kind)}" + (f": {how}" if how else "")
        raise UserError(f"{function}: {name} is {_shown_argument(value)}; {words}") from error
    except ImpossibleError as error:
        raise UserError(f"{function}: {name} is {_shown_argument(value)}; {error}") from error


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
        if StorePath in members and is_url(value):
            return convert(value, str, Rules(stores=True)) if isinstance(value, str) else value
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
    """The value, if it has this class, or a class of this name."""
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
        return f"a list, each item {_describe(members[0])}"
    if kind in WORDS or origin in ORIGINS:
        return WORDS.get(kind) or ORIGINS[origin]
    return _with_article(kind) if isinstance(kind, str) else describe(kind)


def _names(kind: Any) -> list[str]:
    """The names of the classes that an annotation allows."""
    if typing.get_origin(kind) in UNIONS:
        return [name for each in typing.get_args(kind) for name in _names(each)]
    return [kind if isinstance(kind, str) else getattr(kind, "__name__", "")]


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _shown_argument(value: Any) -> str:
    plain = value is None or isinstance(value, numbers.Number | str | bytes)
    return quoted(repr(value)) if plain else _with_article(type(value).__name__)
