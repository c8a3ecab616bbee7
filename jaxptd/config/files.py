"""Finds config files, and reads YAML that users write: such a file, or an option's value.

Refuses YAML that could take forever to read, or that is more than plain values: devices and pipes,
large files, aliases that expand to very many values, and tags that make objects.
"""

import contextlib
import math
import os
import re
import stat
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxptd.errors import QUOTED, UserError, did_you_mean, quoted
from jaxptd.fields.values import UNIONS, ImpossibleError, OtherTypeError, Rules, convert, literals

# ---- configs that come with jaxptd, found by name ------------------------------------------------

SUFFIX = ".yaml"


def packaged_configs() -> dict[str, Path]:
    """Name -> YAML file, sorted by name; one in a subfolder has the name `folder/name`."""
    folder = _folder()
    paths = folder.rglob(f"*{SUFFIX}")
    names = {path.relative_to(folder).as_posix().removesuffix(SUFFIX): path for path in paths}
    return dict(sorted(names.items()))


def find_config(name: str) -> str:
    """Resolves what follows `--config`: a path as it is, else the name of a packaged config.

    Args:
        name: a path, in which `~` is expanded, or the name of a packaged config, with or without
            `.yaml`. A file of that name in the current directory comes first.

    Raises:
        UserError: there is neither such a file nor such a config, or no file can have the name.
    """
    name = _expanded(name)
    if os.path.isfile(name):
        return name
    configs = packaged_configs()
    stem = name.removesuffix(SUFFIX)
    if stem in configs:
        return str(configs[stem])
    if os.path.basename(name) != name:
        return name
    others = (each for each in configs if not each.startswith("test-"))
    remedy = f"use a path, or one of {', '.join(others)}"
    raise UserError(
        f"{quoted(name) or '--config is empty'}: no such file or packaged config; "
        f"{did_you_mean(stem, configs, otherwise=remedy)}"
    )


def _expanded(name: str) -> str:
    try:
        return convert(name, str)
    except ImpossibleError as error:
        raise UserError(f"--config={quoted(name)}: {error}") from error


def _folder() -> Path:
    """`jaxptd/configs` of an installed wheel; in a source checkout `configs` beside `jaxptd`."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


# ---- values that mean something else in YAML than to most people ---------------------------------

# Configs are read as YAML 1.1, in which 0123 is 83 (octal), 1:30 is 90 (base 60), and yes is true.

Kinds = tuple[Any, ...]
LEADING_ZERO = re.compile(r"([-+]?)0([\d_]*\d[\d_]*)")
BASE_60 = re.compile(r"[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?")
# A float to most people and in YAML 1.2, but text to PyYAML.
EXPONENT = re.compile(r"[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+")
TYPES = Rules(below=math.inf, paths=False)
NOT_TEXTS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))


class Dumper(yaml.SafeDumper):
    """Quotes texts that `check_scalars` would otherwise refuse."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("+-0123456789"))


def check_scalars(where: str, node: yaml.Node | None, kind: Any, *, option: bool = False) -> None:
    """Raises UserError for a value that YAML reads as something else than is written.

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
        choices = [x for each in kinds for x in literals(each) if isinstance(x, str)]
        if str not in kinds and not choices:
            _check_number(where, node.value)
        elif not option and not node.style and bool not in kinds:
            _check_word(where, node, choices)


def _members(kind: Any) -> Kinds:
    return typing.get_args(kind) if typing.get_origin(kind) in UNIONS else (kind,)


def _parts(kinds: Kinds, origins: tuple[type, ...], position: int) -> Kinds:
    """The kinds of the items, keys or values of collections of these kinds."""
    arguments = [typing.get_args(each) for each in kinds if typing.get_origin(each) in origins]
    return tuple(part for each in arguments for part in _members(each[position]))


def _check_number(where: str, text: str) -> None:
    if match := LEADING_ZERO.fullmatch(text):
        digits = match[2].replace("_", "").lstrip("0") or "0"
        octal = int(digits, 8) if set(digits) <= set("01234567") else None
        remedy = (
            "" if octal is None or str(octal) == digits else f", or {match[1]}{octal} for octal"
        )
        raise UserError(
            f"{where}: {quoted(text)} begins with 0, which some YAML readers take for octal; "
            f"write {match[1]}{quoted(digits)}{remedy}"
        )
    if BASE_60.fullmatch(text):
        raise UserError(
            f"{where}: {quoted(text)} is a base-60 number in YAML, {_base_60(text):.12g}; "
            "write it without colons"
        )


def _base_60(text: str) -> float:
    number = 0.0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        number = 60 * number + float(part)
    return -number if text.startswith("-") else number


def _check_word(where: str, node: yaml.ScalarNode, choices: list[str]) -> None:
    """Raises UserError for a number or a boolean where text or a choice is expected."""
    if node.tag not in NOT_TEXTS:
        return
    text = quoted(node.value)
    if choices:
        raise UserError(f"{where}: expected one of {', '.join(choices)}, got {text}")
    raise UserError(
        f"{where}: {text} is {_words(node.tag)} in YAML unless it stands in quotes; write '{text}'"
    )


def _words(tag: str) -> str:
    return "true or false" if tag.endswith("bool") else "a number"


LARGEST = 10**6  # bytes
MOST_VALUES = 2000  # in a document, with aliases replaced by what they stand for
MOST_DIGITS = 300  # digits of a whole number; a float cannot be larger
TEMPLATE = "${...} and {{...}} are not expanded: write the values out"
REMEDY = "name a YAML config file"
TAG = "tag:yaml.org,2002:"
PLAIN = frozenset(f"{TAG}{name}" for name in ("str", "seq", "map"))  # wherever they are written
SCALARS = frozenset(f"{TAG}{name}" for name in ("null", "bool", "int", "float", "merge"))


class _TooManyError(yaml.YAMLError):
    """The document has more than `MOST_VALUES` values."""


class _Loader(yaml.SafeLoader):
    """Composes documents of at most `MOST_VALUES` values; dates are texts, and 1e3 is a number."""

    values = 0
    yaml_implicit_resolvers = {  # noqa: RUF012  # as its base class has them
        first: [pair for pair in pairs if pair[0] != f"{TAG}timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            raise _TooManyError(f"it has more than {MOST_VALUES} values")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(f"{TAG}float", EXPONENT, list("+-0123456789"))


def read_yaml(path: str) -> yaml.Node | None:
    """Reads a file as YAML, without making any object of it. None: it is empty.

    Raises:
        UserError: the file cannot be read, is no regular file of text, too large or no plain YAML.
    """
    text = ""
    try:
        text = _read(path).decode("utf-8-sig")
        root = yaml.compose(text, Loader=_Loader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text; {REMEDY}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {REMEDY}") from error
    except _TooManyError as error:
        raise UserError(f"{path}: {error}; {REMEDY}, with globs for many files") from error
    except RecursionError as error:
        raise UserError(f"{path} is not a YAML config: too many brackets; {REMEDY}") from error
    except yaml.YAMLError as error:
        place = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        template = f"; {TEMPLATE}" if re.search(r"\$\{|\{\{|\{%", text) else ""
        raise UserError(f"{path} is not YAML: {quoted(place, 3 * QUOTED)}{template}") from error
    _check_plain(path, root)
    return root


def plain_values(where: str, root: yaml.Node) -> Any:
    """The values of checked YAML. Raises UserError for a merge (`<<`) of no mapping."""
    try:
        return _Loader("").construct_document(root)
    except (ValueError, yaml.YAMLError) as error:
        words = " ".join(getattr(error, "problem", str(error)).split())
        raise UserError(f"{where}: {quoted(words, 3 * QUOTED)}; put texts in quotes") from error


def option_value(name: str, text: str, kind: Any) -> Any:
    """The value of an option: YAML, or the text as it stands where the field has texts.

    Args:
        name: the field's, or that of an option of a command, with its dashes.
        text: that follows it.
        kind: the annotation.

    Raises:
        UserError: it is of another type, not plain, or another value than stands there.
    """
    where = name if name.startswith("-") else f"--{name}"
    try:
        root = yaml.compose(text, Loader=_Loader)
    except (_TooManyError, RecursionError) as error:
        raise UserError(f"{where}={quoted(text)}: too many values; use fewer") from error
    except yaml.YAMLError:
        return typed(name, text, kind)
    _check_plain(where, root)
    check_keys(where, root)
    check_scalars(where, root, kind, option=True)
    if not _has_texts(kind) or bool in _members(kind):
        return typed(name, plain_values(where, root) if root else "", kind)
    if isinstance(root, yaml.CollectionNode):
        with contextlib.suppress(UserError):  # a name with brackets
            return typed(name, plain_values(where, root), kind)
    return None if text == "null" and types.NoneType in _members(kind) else typed(name, text, kind)


def _has_texts(kind: Any) -> bool:
    """True if a field's value, and not only an item of it, can be text."""
    members = _members(kind)
    return str in members or any(isinstance(x, str) for k in members for x in typing.get_args(k))


def typed(name: str, value: Any, kind: Any) -> Any:
    """The value of a field, if it is of the field's type; its limits are checked later.

    Raises:
        UserError: it is of another type.
    """
    try:
        return convert(value, kind, TYPES)
    except ImpossibleError:
        return value
    except OtherTypeError as error:
        shown = " ".join(str(value).split())
        expected = f"expected {describe_type(kind)}, got {quoted(shown) or 'nothing'}"
        raise UserError(f"{name}: {expected}") from error


LISTED: Mapping[Any, Sequence[str]] = {bool: ("true", "false"), types.NoneType: ("null",)}


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values of a field, as they are written; none if they cannot be listed."""
    values: list[str] = []
    for each in _members(kind):
        origin: Any = typing.get_origin(each)
        if origin is typing.Literal:
            values += map(str, literals(each))
        elif each in LISTED:
            values += LISTED[each]
        else:
            return ()
    return tuple(values)


def describe_type(annotation: Any) -> str:
    """Describes a type: `int | None` as "int or null", `Literal["a", "b"]` as "one of a, b"."""
    if annotation is types.NoneType:
        return "null"
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {', '.join(map(str, literals(annotation)))}"
    if typing.get_origin(annotation) in UNIONS:
        return " or ".join(map(describe_type, members))
    if members and typing.get_origin(members[0]) is typing.Literal:
        return f"list, each {describe_type(members[0])}"
    return str(annotation).replace(" | ", " or ") if members else str(annotation.__name__)


def _check_plain(where: str, root: yaml.Node | None) -> None:
    """Raises UserError for tags, very long numbers, keys that are no names, and too many values.

    Args:
        where: the file or option, for the message.
        root: of the YAML.
    """
    for count, node in enumerate(_nodes(root)):
        if count > MOST_VALUES:
            raise UserError(
                f"{where}: with its aliases it has more than {MOST_VALUES} values; write the "
                "values out, without & and *"
            )
        line = node.start_mark.line + 1
        if node.tag not in PLAIN and not _is_implicit(node):
            tag = quoted(node.tag.replace(TAG, "!!"))
            raise UserError(f"{where} has the tag {tag} in line {line}; use values without tags")
        if isinstance(node, yaml.MappingNode):
            _check_names(where, node)
        if node.tag == f"{TAG}int" and len(node.value) > MOST_DIGITS:
            digits = len(node.value)
            raise UserError(f"{where} has a number of {digits} digits in line {line}; use fewer")


def _check_names(where: str, mapping: yaml.MappingNode) -> None:
    """Raises UserError for a key that is a list or a mapping, which no dict can have."""
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise UserError(f"{where}: a key in line {line} is a {key.id}, not a name; {TEMPLATE}")


def check_keys(where: str, root: yaml.Node | None) -> None:
    """Raises UserError for a mapping that has a key twice: the last would count."""
    for node in _nodes(root):
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise UserError(f"{where}: {quoted(str(key))} appears twice; remove one")


def _is_implicit(node: yaml.Node) -> bool:
    """True for a number, date or the like that is known by its characters, without a tag."""
    if not isinstance(node, yaml.ScalarNode) or node.style or node.tag not in SCALARS:
        return False
    return node.tag == _Loader("").resolve(yaml.ScalarNode, node.value, (True, False))


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """All nodes, aliased ones each time; endless for a document that contains itself."""
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _read(path: str) -> bytes:
    """Reads a regular file that is not too large.

    Raises:
        OSError: it cannot be read.
        UserError: it is no such file.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a directory; {REMEDY}")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is a device or a pipe, not a file on disk; {REMEDY}")
    if status.st_size > LARGEST:
        raise UserError(
            f"{path} has {status.st_size} bytes, but a config at most {LARGEST}; {REMEDY}"
        )
    with open(path, "rb") as file:
        return file.read(LARGEST)
