"""The manifest of a checkpoint: its content, and size and CRC-32 of every file beside it.

manifest.json holds step, description, tensors: {name: {shape, dtype}}, files: {name: {size,
crc32}}, format, and the CRC-32 of the manifest itself. It is written last, by `seal`. `read`
checks its shape; `check_files` and `check_tensors` compare a folder with it.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from jaxptd import stores
from jaxptd.atomic_files import shown
from jaxptd.checkpoint import folders
from jaxptd.checkpoint.folders import (
    MANIFEST,
    STEP,
    CheckpointError,
    DamagedCheckpointError,
    quoted,
    reason,
)
from jaxptd.stores import Place, StoreError, StorePath

# ---- the form of its content ---------------------------------------------------------------------

# A CRC-32 shows that a manifest is as it was written. It does not show that this library wrote it.

LONGEST_NAME = 255  # characters of a file, a tensor or a dtype
METRICS = ("validation_", "perplexity")  # what the names of an evaluation's metrics begin with
MOST_DIMS = 64  # as in numpy
KEYS = ("step", "description", "tensors", "format", "files")

Check = Callable[[Any], bool]


def find_fault(manifest: dict[str, Any], name: str, *, reserved: str) -> str | None:
    """Says what is wrong with a manifest; None if nothing is.

    Args:
        manifest: the parsed JSON, without its own CRC-32.
        name: of the checkpoint's folder.
        reserved: name of the manifest's own file, which it does not list.
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
        _fault_of_metrics(description)
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


def _fault_of_metrics(description: dict[str, Any]) -> str | None:
    for name, value in description.items():
        fine = value is None or (type(value) in (int, float) and abs(value) < math.inf)
        if name.startswith(METRICS) and not fine:
            return f"{quoted(name)} is {quoted(value)}, not a number"
    return None


def _fault_of_each(key: str, entries: Any, checks: dict[str, Check]) -> str | None:
    """Says which entry of `tensors` or `files` has missing, extra or wrong fields."""
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
    """True for a file's path within a folder, spelled as `sync_files` does."""
    path = PurePosixPath(name)
    return name == str(path) != "." and not path.is_absolute() and ".." not in path.parts


FORMAT = 1
SHARED = "train.run_dir must be on a file system that all processes see, or a URL in a store"
LARGEST = 2**28  # bytes of a manifest, far more than any model's needs
LISTED = 5  # most differing tensors in one message


def sync_files(folder: Path, process: int, *, processes: int) -> dict[str, dict[str, int]]:
    """Calls fsync on the files that this process wrote into a folder; size and CRC-32 of each.

    orbax puts a process's number into the names of its files; process 0 wrote all others.
    """
    sizes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        match = re.search(r"process_(\d+)(/|$)", name)
        writer = int(match[1]) if match and int(match[1]) < processes else 0
        if writer == process and path.is_file():
            sizes[name] = folders.sync_file(path)
    return sizes


def seal(folder: Path, content: dict[str, Any], files: dict[str, dict[str, int]]) -> None:
    """Syncs the folders in a checkpoint and writes its manifest.

    Args:
        folder: of the checkpoint.
        content: step, description, tensors.
        files: the results of `sync_files` of all processes.
    """
    inside = sorted(folder.rglob("*"))
    names = {p.relative_to(folder).as_posix() for p in inside if p.is_file()}
    if unseen := sorted(names ^ files.keys()):
        raise CheckpointError(f"not every process sees {unseen[0]}; {SHARED}")
    for path in inside:
        if path.is_dir():
            folders.sync_folder(path)
    (folder / MANIFEST).write_text(text_of(content, files))
    folders.sync_file(folder / MANIFEST)
    folders.sync_folder(folder)


def text_of(content: dict[str, Any], files: dict[str, dict[str, int]]) -> str:
    """The text of a manifest; arguments as of `seal`."""
    manifest = json.loads(json.dumps(content)) | {"format": FORMAT}  # as `read` will parse it
    manifest["files"] = {name: files[name] for name in sorted(files)}
    manifest["crc32"] = _crc_of(manifest)
    return json.dumps(manifest, indent=1)


def read(folder: Place) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, and checks its CRC and shape. Raises CheckpointError."""
    _check_is_checkpoint(folder)
    manifest = _load(folder)
    try:
        intact = manifest.pop("crc32") == _crc_of(manifest)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{MANIFEST} is not a manifest") from error
    if not intact:
        raise _damaged(folder, f"{MANIFEST} was changed (its CRC-32 differs)")
    version = manifest.get("format")
    if type(version) is int and version != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {quoted(version)}, but this version of jaxptd reads "
            f"{FORMAT}; use the version it was saved with"
        )
    if fault := find_fault(manifest, folder.name, reserved=MANIFEST):
        raise _damaged(folder, f"{MANIFEST} has wrong content: {fault}")
    return manifest


def _load(folder: Place) -> Any:
    try:
        if isinstance(folder, StorePath):
            return json.loads(stores.read_bytes(folder / MANIFEST))
        with folders.open_regular(folder / MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise _damaged(folder, f"{MANIFEST} has more than {LARGEST} bytes")
            return json.loads(file.read())
    except FileNotFoundError as error:
        raise _damaged(folder, f"{MANIFEST} is missing") from error
    except OSError as error:
        raise _damaged(folder, f"{MANIFEST}: {reason(error)}") from error
    except (CheckpointError, StoreError):
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{MANIFEST} is not a manifest") from error


def check_files(folder: Place, files: dict[str, dict[str, int]]) -> None:
    """Raises DamagedCheckpointError naming the first file that differs from what was saved.

    Of objects in a store it only compares the sizes: what is read is checked when it is read.
    """
    if isinstance(folder, StorePath):
        _check_sizes(folder, files)
        return
    for path in folder.rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise _damaged(folder, f"{path.relative_to(folder)} is a pipe or a device")
    for name, saved in files.items():
        try:
            with folders.open_regular(folder / name) as file:
                actual = folders.size_and_crc(file)
        except FileNotFoundError as error:
            raise _damaged(folder, f"{name} is missing") from error
        except OSError as error:
            raise _damaged(folder, f"{name}: {reason(error)}") from error
        if actual["size"] != saved["size"]:
            raise _damaged(folder, f"{name} has {actual['size']} bytes, not {saved['size']}")
        if actual["crc32"] != saved["crc32"]:
            raise _damaged(folder, f"{name} was changed (its CRC-32 differs)")


def _check_sizes(folder: StorePath, files: dict[str, dict[str, int]]) -> None:
    listed = folder.store.listing(folder.key)
    for name, saved in files.items():
        key = (folder / name).key
        size = listed.get(key)
        if size != saved["size"]:  # the listing may be old
            size = folder.store.size(key)
        if size is None:
            raise _damaged(folder, f"{name} is missing")
        if size != saved["size"]:
            raise _damaged(folder, f"{name} has {size} bytes, not {saved['size']}")


def check_tensors(folder: Place, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError naming tensors that differ between the checkpoint and the run."""
    names = dict.fromkeys([*wanted, *saved])
    differences = [
        line for name in names if (line := _difference(name, saved.get(name), wanted.get(name)))
    ]
    if differences:
        rest = f"; and {len(differences) - LISTED} more" if len(differences) > LISTED else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit: {'; '.join(differences[:LISTED])}{rest}; "
            "use the config it was saved with"
        )


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a state keyed by path, in the state's order. Raises CheckpointError."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise CheckpointError(f"two tensors of the state are named {name}; rename one")
        named[name] = leaf
    return named


def shapes(tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor, as in the manifest."""
    return {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in tensors.items()}


def _check_is_checkpoint(folder: Place) -> None:
    """Raises CheckpointError if a path that a user gave is not a checkpoint's."""
    remedy = "name a folder such as run_dir/checkpoints/00000100"
    if isinstance(folder, StorePath):
        if not folder.store.exists((folder / MANIFEST).key):
            raise CheckpointError(f"there is no checkpoint {folder}; {remedy}")
        return
    if not os.path.isdir(folder):
        raise CheckpointError(f"there is no checkpoint {shown(folder)}; {remedy}")
    if not os.path.exists(folder / MANIFEST) and not re.search(STEP, folder.name):
        raise CheckpointError(f"{folder} is not a checkpoint; {remedy}")


def _damaged(folder: Place, cause: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint {folder} is damaged: {cause}")


def _difference(name: str, saved: dict[str, Any] | None, wanted: dict[str, Any] | None) -> str:
    """Words for how a tensor in the checkpoint differs from this run's; empty if it does not."""
    if saved is None:
        return f"{name} is in this run, not in the checkpoint"
    if wanted is None:
        return f"{name} is in the checkpoint, not in this run"
    for key in ("shape", "dtype"):
        if wanted[key] != saved[key]:
            return f"{name} is {saved[key]} in the checkpoint, {wanted[key]} in this run"
    return ""


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
