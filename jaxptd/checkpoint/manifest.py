"""A checkpoint's folder: everything in it on the disk, and proof that nothing changed since.

`put_on_disk` and `seal` write manifest.json last: step, description, tensors: {name: {shape,
dtype}}, files: {name: {size, crc32}}, format and crc32, its own, so that nothing in it changes
unseen either. `read_manifest`, `check_files` and `check_tensors` hold a folder against it.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import jax

from jaxptd.errors import UserError

MANIFEST = "manifest.json"
STEP = "[0-9]{8,}"  # the name of a checkpoint's folder
FORMAT = 1
SHARED = "train.run_dir must lie where all processes see the same files"
LISTED = 5  # tensors that differ, in one message
CHUNK = 2**20  # bytes read at a time for the CRC: large enough for full disk speed


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used. One line: which one, and what is wrong."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was saved: a file is missing, cut short or changed."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {what}")


def put_on_disk(folder: Path, process: int, *, processes: int) -> dict[str, dict[str, int]]:
    """Puts one process's share of the files in a folder on the disk; size and CRC-32 of each.

    What orbax has a process write lies under its number; the rest is the first one's.
    """
    mine = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        match = re.search(r"process_(\d+)(/|$)", name)
        writer = int(match[1]) if match and int(match[1]) < processes else 0
        if writer == process and path.is_file():
            mine[name] = _sync_file(path)
    return mine


def seal(folder: Path, content: dict[str, Any], files: dict[str, dict[str, int]]) -> None:
    """Puts the names in a folder on the disk, then `content` and what its files hold: its manifest.

    Args:
        folder: what is sealed.
        content: step, description, tensors.
        files: what `put_on_disk` gave, of all processes.
    """
    manifest = json.loads(json.dumps(content)) | {"format": FORMAT}  # its CRC is of what is read
    inside = sorted(folder.rglob("*"))
    names = {p.relative_to(folder).as_posix() for p in inside if p.is_file()}
    if unseen := sorted(names ^ files.keys()):
        raise CheckpointError(f"{unseen[0]} is not there for every process; {SHARED}")
    manifest["files"] = {name: files[name] for name in sorted(files)}
    for path in inside:
        if path.is_dir():
            sync_folder(path)
    manifest["crc32"] = _crc_of(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync_file(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own CRC. Raises CheckpointError."""
    _check_is_checkpoint(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        intact = manifest.pop("crc32") == _crc_of(manifest)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST} is missing") from error
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST} is not a manifest") from error
    if not intact:
        raise DamagedCheckpointError(folder, f"{MANIFEST} was changed (its CRC-32 differs)")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest['format']}, this version of jaxptd reads "
            f"{FORMAT}; use the version it was saved with"
        )
    return manifest


def _check_is_checkpoint(folder: Path) -> None:
    """Raises CheckpointError if a path given by hand is something else."""
    remedy = "name a folder such as run_dir/checkpoints/00000100"
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; {remedy}")
    if not (folder / MANIFEST).exists() and not re.search(STEP, folder.name):
        raise CheckpointError(f"{folder} is not a checkpoint; {remedy}")


def check_files(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Raises DamagedCheckpointError naming the first file that is not as it was saved."""
    for name, saved in files.items():
        try:
            with open(folder / name, "rb") as file:
                found = _size_and_crc(file)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(folder, f"{name} is missing") from error
        except OSError as error:
            raise DamagedCheckpointError(folder, f"{name}: {reason(error)}") from error
        if found["size"] != saved["size"]:
            sizes = f"{found['size']} bytes, not {saved['size']}"
            raise DamagedCheckpointError(folder, f"{name} has {sizes}")
        if found["crc32"] != saved["crc32"]:
            raise DamagedCheckpointError(folder, f"{name} was changed (its CRC-32 differs)")


def by_name(tree: Any) -> dict[str, Any]:
    """The tensors of a state by name, in the state's order."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise CheckpointError(f"two tensors of the state are named {name}; rename one")
        named[name] = leaf
    return named


def shapes(tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in tensors.items()}


def check_tensors(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError naming the tensors that checkpoint and run do not share."""
    names = dict.fromkeys([*wanted, *saved])
    wrong = [line for name in names if (line := _other(name, saved.get(name), wanted.get(name)))]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit: {'; '.join(wrong[:LISTED])}{more}; "
            "use the config it was saved with"
        )


def _other(name: str, there: dict[str, Any] | None, here: dict[str, Any] | None) -> str | None:
    """How a tensor of the checkpoint differs from this run's; None if it does not."""
    if there is None:
        return f"{name} is in this run, not in the checkpoint"
    if here is None:
        return f"{name} is in the checkpoint, not in this run"
    for key in ("shape", "dtype"):
        if here[key] != there[key]:
            return f"{name} is {there[key]} in the checkpoint, {here[key]} in this run"
    return None


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _size_and_crc(file: BinaryIO) -> dict[str, int]:
    size = crc = 0
    while chunk := file.read(CHUNK):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"size": size, "crc32": crc}


def _sync_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file, all of which is on the disk afterwards."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return _size_and_crc(file)


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on the disk, as fsync of the files does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Deletes a folder if it can; what stays has a hidden name and goes at the next save."""
    shutil.rmtree(folder, ignore_errors=True)


def reason(error: BaseException) -> str:
    """What went wrong in the system's own words: tensorstore hides its error number in the text."""
    if isinstance(error, UserError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if match := re.search(r"os_error_code='(\d+)'", str(cause)):
            return os.strerror(int(match[1]))
        cause = cause.__cause__
    return " ".join(str(error).split()) or type(error).__name__
