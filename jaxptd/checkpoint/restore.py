"""Restoring one checkpoint: every file is checked before anything is read into arrays."""

from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxptd.checkpoint import arrays, manifest
from jaxptd.checkpoint.agreement import run_on_all, run_on_first
from jaxptd.checkpoint.save import ARRAYS, require_seen


def read_description(path: Path) -> dict[str, Any]:
    """The description saved with the checkpoint in this folder. Raises CheckpointError."""
    return manifest.read(Path(path))["description"]


def restore_path(path: Path, target: Any) -> tuple[int, Any]:
    """Checks the checkpoint in this folder and restores its step and state.

    Args:
        path: the folder of one step.
        target: the state as jax.ShapeDtypeStruct with sharding (None: the first device); mesh and
            sharding may differ from those it was saved with.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or changed.
        CheckpointError: a tensor's name, shape or dtype differs from `target`.
    """
    path = Path(path)
    run_on_first("checked", partial(check, path, target))
    return load(path, target)


def restore_part(path: Path, target: Any) -> Any:
    """Checks the checkpoint in this folder and restores a part of its state.

    Args:
        path: the folder of one step.
        target: as that of `restore_path`, without what is not restored.

    Raises:
        DamagedCheckpointError, CheckpointError: as `restore_path`.
    """
    run_on_first("checked", partial(check, Path(path), target, part=True))
    return load(Path(path), target)[1]


def read_tensors(path: Path) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor of the checkpoint in this folder. Raises CheckpointError."""
    tensors: dict[str, dict[str, Any]] = manifest.read(Path(path))["tensors"]
    return tensors


def load_part(path: Path, target: Any) -> Any:
    """Reads a part of a checkpoint that was checked; see `restore_part`."""
    return load(Path(path), target)[1]


def check_whole(path: Path) -> None:
    """Raises CheckpointError unless the checkpoint is complete and undamaged."""
    manifest.check_files(path, manifest.read(path)["files"])


def check(path: Path, target: Any, *, part: bool = False) -> None:
    """Raises CheckpointError unless the checkpoint is complete, undamaged and fits `target`.

    part: it may have more than `target`.
    """
    saved, wanted = manifest.read(path), manifest.shapes(manifest.by_name(target))
    manifest.check_files(path, saved["files"])
    tensors = saved["tensors"]
    if part:
        tensors = {name: each for name, each in tensors.items() if name in wanted}
    manifest.check_tensors(path, tensors, wanted)


def load(path: Path, target: Any) -> tuple[int, Any]:
    """Reads step and state, or a part of it, of a checkpoint that `check` accepted."""
    run_on_all("there", partial(require_seen, path))
    wanted = manifest.by_name(target)
    found = arrays.load(path / ARRAYS, wanted, checkpoint=path)
    state = jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])
    return manifest.read(path)["step"], state
