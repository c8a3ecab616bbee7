"""Converts a config to the text of a YAML file and back; finds its keys for messages."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxptd.config.files import (
    Dumper,
    check_keys,
    check_scalars,
    packaged_configs,
    plain_values,
    read_yaml,
)
from jaxptd.config.model import nested
from jaxptd.config.run import Config, from_dict, section_class, to_dict
from jaxptd.errors import UserError, nearest, quoted

RUN_CONFIG = "config.yaml"  # in a run's directory


def as_yaml(config: Config) -> str:
    """The text of a config file with every field."""
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False))


def read_config(path: Path) -> Config:
    """Reads a file that `as_yaml` wrote, such as that of a run.

    Raises:
        UserError: it cannot be read, or is no config.
    """
    return from_dict(nested(read_file(str(path))))


def read_file(path: str, others: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a config file as they are written, by names such as `model.rope.theta`.

    A section of the model may be null.

    Args:
        path: of the file.
        others: keys that it may have besides.

    Raises:
        UserError: it is not YAML whose keys are sections and fields of a config.
    """
    root, fields = read_yaml(path), {}
    for section, node in _entries(path, root):
        if section in others:
            fields[section] = plain_values(path, node)
        elif section in section_names():
            fields |= _read_section(path, section, node, others)
        else:
            known = ", ".join(section_names())
            raise UserError(f"{path}: unknown section {quoted(section)}; use {known}")
    return fields


def _read_section(
    path: str, section: str, node: yaml.Node, others: Collection[str]
) -> dict[str, Any]:
    """The fields of a section, by their whole names."""
    fields: dict[str, Any] = {}
    for name, value in _entries(f"{path}: section {section}", node):
        key = f"{section}.{name}"
        if key in sections() and not value.tag.endswith(":null"):
            fields |= _read_section(path, key, value, others)
            continue
        if key not in (*field_types(), *sections(), *others):
            raise UserError(f"{path}: unknown key {quoted(key)}; {nearest_key(key)}")
        check_keys(f"{path}: {key}", value)
        check_scalars(f"{path}: {key}", value, field_types().get(key, Any))
        fields[key] = plain_values(path, value)
    return fields


def _entries(where: str, node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values of a YAML mapping. Raises UserError for no mapping, or a repeated key."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        kind = node.tag.rpartition(":")[2] if node else "nothing"
        raise UserError(f"{where}: expected `name: value` lines, found {kind}; see --print_config")
    seen = set()
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
        if name in seen:
            raise UserError(f"{where}: {quoted(name)} appears twice; remove one")
        seen.add(name)
        yield name, value


def section_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Config)]


@functools.cache
def sections() -> dict[str, Any]:
    """The class of every section, also of those of the model, such as `model.rope`."""
    found = {section.name: section.type for section in dataclasses.fields(Config)}
    for name, cls in list(found.items()):
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if (inner := section_class(field.type)) is not None:
                found[f"{name}.{field.name}"] = inner
    return found


@functools.cache
def field_types() -> dict[str, Any]:
    """Every field of a config and its type, as `model.rope.theta`.

    In a section of the model null stands for what the model's family has.
    """
    return {
        f"{section}.{field.name}": _or_null(field.type) if "." in section else field.type
        for section, cls in sections().items()
        for field in dataclasses.fields(cls)
        if f"{section}.{field.name}" not in sections()
    }


def _or_null(kind: Any) -> Any:
    return kind | None


def nearest_key(key: str, options: Iterable[str] = ()) -> str:
    """Remedy for an unknown key: the field whose name is most like the end of the key.

    Args:
        key: as it was given, without dashes.
        options: of the command, such as `--config`; one may be meant that is no field.
    """
    if key in field_types():
        return f"write --{key}"
    if key.rpartition(".")[0] in field_types():
        return f"did you mean {key.rpartition('.')[0]}?"
    if key in packaged_configs():
        return f"did you mean --config {key}?"
    others = {name.lstrip("-"): name for name in options if "." not in name}
    sectionless = {name: option for name, option in others.items() if name not in section_names()}
    deepest = sorted(field_types(), key=lambda field: -field.count("."))
    fields = {field.rpartition(".")[2]: field for field in deepest}
    fields |= {field.partition(".")[2]: field for field in deepest}
    candidates = sectionless | fields
    name = key.partition(".")[2] if key.count(".") > 1 else key.rpartition(".")[2]
    near = nearest(name.lstrip("-"), candidates)
    return f"did you mean {candidates[near]}?" if near else "see jaxptd train --help-all"
