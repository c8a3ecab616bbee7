"""The form that the content of a manifest must have, checked once, when it is read.

A CRC-32 shows that a manifest is as it was written. It does not show that this library wrote it.
"""

import math
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from jaxptd.checkpoint.errors import quoted

LONGEST_NAME = 255  # characters of a file, a tensor or a dtype
MOST_DIMS = 64  # as in numpy
KEYS = ("step", "description", "tensors", "format", "files")

Check = Callable[[Any], bool]


def find_fault(manifest: dict[str, Any], name: str, *, reserved: str) -> str | None:
    """Says what is wrong with a manifest, None if nothing is.

    Args:
        manifest: as JSON was read, without its own CRC-32.
        name: of the checkpoint's folder.
        reserved: name of the manifest's file, which is not among its files.
    """
    if keys := sorted(set(KEYS) ^ set(manifest)):
        return f"it has {'no' if keys[0] in KEYS else 'an unknown'} {quoted(keys[0])}"
    step, description = manifest["step"], manifest["description"]
    if type(manifest["format"]) is not int:
        return f"format is {quoted(manifest['format'])}, not a number"
    if not _is_count(step):
        return f"step is {quoted(step)}, not a number of steps"
    if re.fullmatch("[0-9]{8,}", name) and int(name) != step:
        return f"it is of step {quoted(step)}, its folder of step {int(name)}"
    if not isinstance(description, dict):
        return f"description is {quoted(description)}, not an object"
    return (
        _fault_of_loss(description)
        or _fault_of_each("tensors", manifest["tensors"], {"shape": _is_shape, "dtype": _is_name})
        or _fault_of_each("files", manifest["files"], {"size": _is_count, "crc32": _is_crc})
        or next(
            (
                f"files has {quoted(each)}, which is no file in a checkpoint"
                for each in manifest["files"]
                if not _is_inside(each) or each == reserved
            ),
            None,
        )
    )


def _fault_of_loss(description: dict[str, Any]) -> str | None:
    loss = description.get("validation_loss")
    if loss is None or (type(loss) in (int, float) and abs(loss) < math.inf):
        return None
    return f"validation_loss is {quoted(loss)}, not a number"


def _fault_of_each(key: str, entries: Any, checks: dict[str, Check]) -> str | None:
    """Says which entry of `tensors` or `files` has not just these fields, or a wrong value."""
    if not isinstance(entries, dict) or not entries:
        return f"{key} is {quoted(entries)}, not an object with a field for each"
    for name, fields in entries.items():
        if not _is_name(name):
            return f"{key} has {quoted(name)}, which is no name"
        if not isinstance(fields, dict) or set(fields) != set(checks):
            return f"{key} has {quoted(name)}: {quoted(fields)}, not its {' and '.join(checks)}"
        for field, check in checks.items():
            if not check(fields[field]):
                return f"{key} has {quoted(name)} with {field} {quoted(fields[field])}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_crc(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_NAME


def _is_shape(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MOST_DIMS:
        return False
    return all(_is_count(size) and size > 0 for size in value)


def _is_inside(name: str) -> bool:
    """True for the path of a file in a folder, written as `sync_files` writes it."""
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts
