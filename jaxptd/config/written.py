"""A config as the text of a YAML file, and back; what its keys are, for messages."""

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
from jaxptd.config.run import Config, from_dict, to_dict
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
    return from_dict(read_file(str(path)))


def read_file(path: str, others: Collection[str] = ()) -> dict[str, Any]:
    """The sections of a config file, as they are written.

    Args:
        path: of the file.
        others: keys that it may have besides.

    Raises:
        UserError: it is not YAML whose keys are sections and fields of a config.
    """
    root = read_yaml(path)
    for section, fields in _entries(path, root):
        if section in others:
            continue
        if section not in section_names():
            known = ", ".join(section_names())
            raise UserError(f"{path}: unknown section {quoted(section)}; use {known}")
        for name, value in _entries(f"{path}: section {section}", fields):
            key = f"{section}.{name}"
            if key not in (*field_types(), *others):
                raise UserError(f"{path}: unknown key {quoted(key)}; {nearest_key(key)}")
            check_keys(f"{path}: {key}", value)
            check_scalars(f"{path}: {key}", value, field_types().get(key, Any))
    sections: dict[str, Any] = plain_values(path, root)  # type: ignore[arg-type]
    return sections


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
def field_types() -> dict[str, Any]:
    """Every `section.field` of a config and its type."""
    return {
        f"{section.name}.{field.name}": field.type
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)  # type: ignore[arg-type]
    }


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
    fields = {field.rpartition(".")[2]: field for field in field_types()}
    candidates = sectionless | fields
    near = nearest(key.rpartition(".")[2].lstrip("-"), candidates)
    return f"did you mean {candidates[near]}?" if near else "see jaxptd train --help-all"
