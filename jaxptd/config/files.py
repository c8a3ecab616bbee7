"""Reads YAML that a person wrote: a config file, or the value of an option.

YAML that would take for ever to read, or that is more than plain values, is refused: devices and
pipes, large files, aliases that stand for a great many values, and tags that make objects.
"""

import os
import re
import stat
from collections.abc import Iterator
from typing import Any

import yaml

from jaxptd.config.scalars import check_scalars
from jaxptd.errors import QUOTED, UserError, quoted

LARGEST = 10**6  # bytes
# In a document, with aliases replaced by what they stand for. The time of jsonargparse grows with
# the square of their number: 2000 take 6 s.
MOST_VALUES = 2000
MOST_DIGITS = 300  # of a whole number; a float cannot be larger
TEMPLATE = "no ${...} or {{...}} is replaced here: write the values out"
REMEDY = "name a YAML file of a config"
TAG = "tag:yaml.org,2002:"
PLAIN = frozenset(f"{TAG}{name}" for name in ("str", "seq", "map"))  # wherever they are written
SCALARS = frozenset(
    f"{TAG}{name}" for name in ("null", "bool", "int", "float", "timestamp", "merge")
)


class _TooManyError(yaml.YAMLError):
    """The document has more than `MOST_VALUES` values."""


class _Loader(yaml.SafeLoader):
    """Composes documents of at most `MOST_VALUES` values; reading more takes seconds."""

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            raise _TooManyError(f"it has more than {MOST_VALUES} values")
        return super().compose_node(parent, index)


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
        raise UserError(f"{path} is not YAML of a config: too many brackets; {REMEDY}") from error
    except yaml.YAMLError as error:
        place = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        template = f"; {TEMPLATE}" if re.search(r"\$\{|\{\{|\{%", text) else ""
        raise UserError(f"{path} is not YAML: {quoted(place, 3 * QUOTED)}{template}") from error
    _check_plain(path, root)
    try:
        yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:  # a date that no month has, say
        words = " ".join(getattr(error, "problem", str(error)).split())
        raise UserError(f"{path}: {quoted(words, 3 * QUOTED)}; put texts in quotes") from error
    return root


def check_value(name: str, text: str, kind: Any) -> None:
    """Raises UserError if the value of an option is not plain, or another one than stands there.

    Args:
        name: of the option.
        text: its value.
        kind: the annotation of its field.
    """
    where = f"--{quoted(name)}"
    check_scalars(where, _check_text(where, text), kind, option=True)


def _check_text(where: str, text: str) -> yaml.Node | None:
    """The YAML of a text, since jsonargparse reads each as YAML once more; None: it is none.

    Raises:
        UserError: it is not plain.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except (_TooManyError, RecursionError) as error:
        raise UserError(f"{where}={quoted(text)}: too many values; use fewer") from error
    except yaml.YAMLError:
        return None
    if not isinstance(root, yaml.ScalarNode) or root.value != text or root.tag != f"{TAG}str":
        _check_plain(where, root)
        check_keys(where, root)
    return root


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
        if node.tag == f"{TAG}str":
            _check_text(where, node.value)


def _check_names(where: str, mapping: yaml.MappingNode) -> None:
    """Raises UserError for a key that is a list or a mapping, which no dict can have."""
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise UserError(f"{where}: a key in line {line} is a {key.id}, no name; {TEMPLATE}")


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
    """All nodes, those behind an alias each time; a document that contains itself has no end."""
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
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is a directory; {REMEDY}")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is a device or a pipe, not a file on disk; {REMEDY}")
    if found.st_size > LARGEST:
        raise UserError(f"{path} has {found.st_size} bytes, a config at most {LARGEST}; {REMEDY}")
    with open(path, "rb") as file:
        return file.read(LARGEST)
