"""One save, from the first folder to the last rename, and one restore: checks, then arrays.

Work that fails on one process fails on all: otherwise a process whose disk is full would abandon a
save and the others would wait for it.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxptd import stores
from jaxptd.checkpoint import arrays, folders, manifest, pieces
from jaxptd.checkpoint.arrays import PendingWrite
from jaxptd.checkpoint.folders import CheckpointError, Folders, reason
from jaxptd.distributed.coordination import is_first, share
from jaxptd.stores import Place, StorePath

TIMEOUT = 3600.0  # seconds to wait for the slowest process; a dead one is noticed much earlier


def run_on_all(name: str, work: Callable[[], Any]) -> list[Any]:
    """Runs work on this process and waits for the other processes to run theirs.

    Args:
        name: of this work, see `share`.
        work: returns JSON values.

    Returns:
        The results of all processes, in the order of their ranks.

    Raises:
        Exception: this process's own, if no other process failed.
        CheckpointError: the failures of all processes, each with its rank.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    message = {"result": result, "failure": reason(failure) if failure else None}
    replies = share(f"checkpoint.{name}", json.dumps(message), seconds=TIMEOUT)
    everyone = [json.loads(text) for text in replies]
    failed = {process: each["failure"] for process, each in enumerate(everyone) if each["failure"]}
    if failure is not None and [*failed] == [jax.process_index()]:
        raise failure
    if failed:
        text = "; ".join(f"{each} (process {process})" for process, each in failed.items())
        raise CheckpointError(text) from failure
    return [each["result"] for each in everyone]


def run_on_first(name: str, work: Callable[[], Any]) -> Any:
    """Runs work on process 0 alone; all processes return its result. Raises as `run_on_all`."""
    return run_on_all(name, work if is_first() else lambda: None)[0]


# ---- saving --------------------------------------------------------------------------------------

# Training waits only for `start`; `finish` uses no device and may run in a thread.

ARRAYS = "arrays"


def start(folders: Folders, step: int, tensors: dict[str, jax.Array]) -> PendingWrite:
    """Creates the folder and copies what the next step may change. Raises any failure."""
    folder = folders.partial(step)
    run_on_first("made", lambda: folders.make_partial(step))
    writes: list[PendingWrite] = []
    try:
        run_on_all("seen", lambda: require_seen(folder))
        run_on_all("copied", lambda: writes.append(PendingWrite(folder / ARRAYS, tensors)))
    except BaseException:
        for write in writes:
            write.abort()
        _remove_on_first(folder)
        raise
    return writes[0]


def finish(folders: Folders, content: dict[str, Any], write: PendingWrite) -> None:
    """Waits for the arrays, seals the folder and moves it into place. Raises any failure.

    Args:
        folders: those that `start` used.
        content: step, description, tensors.
        write: the result of `start`.
    """
    step = content["step"]
    folder = folders.partial(step)
    try:
        run_on_all("written", write.wait_written)
        run_on_all("merged", write.finish)
        files = {}
        for each in run_on_all("on_disk", lambda: _sync_files(folder)):
            files.update(each)
        run_on_first("sealed", lambda: manifest.seal(folder, content, files))
        run_on_first("placed", lambda: folders.move_into_place(step))
    except Exception:
        write.abort()
        raise
    finally:
        _remove_on_first(folder)


def savable(state: Any) -> dict[str, jax.Array]:
    """The state's tensors by name. Raises CheckpointError if orbax could not save one."""
    named = manifest.by_name(state)
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array):
            raise CheckpointError(
                f"{name} of the state is a {type(leaf).__name__}, not a jax array"
            )
        if leaf.size == 0:
            raise CheckpointError(
                f"{name} of the state is empty ({list(leaf.shape)}); leave it out"
            )
    return named


def require_seen(folder: Place) -> None:
    """Raises CheckpointError if this process does not see a folder that process 0 sees."""
    if isinstance(folder, StorePath):
        manifest.read(folder)
    elif not folder.is_dir():
        raise CheckpointError(f"not every process sees {folder}; {manifest.SHARED}")


def _sync_files(folder: Path) -> dict[str, dict[str, int]]:
    return manifest.sync_files(folder, jax.process_index(), processes=jax.process_count())


def _remove_on_first(folder: Path) -> None:
    if is_first():
        folders.remove(folder)


# ---- restoring -----------------------------------------------------------------------------------


def read_description(path: Place) -> dict[str, Any]:
    """The description saved with the checkpoint in this folder. Raises CheckpointError."""
    return manifest.read(stores.place(path))["description"]


def restore_path(path: Place, target: Any) -> tuple[int, Any]:
    """Checks the checkpoint in this folder and restores its step and state.

    Args:
        path: the folder of one step.
        target: the state as jax.ShapeDtypeStruct with sharding (None: the first device); mesh and
            sharding may differ from those it was saved with.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or changed.
        CheckpointError: a tensor's name, shape or dtype differs from `target`.
    """
    path = stores.place(path)
    run_on_first("checked", partial(check, path, target))
    return load(path, target)


def restore_part(path: Place, target: Any) -> Any:
    """Checks the checkpoint in this folder and restores a part of its state.

    Args:
        path: the folder of one step.
        target: as in `restore_path`, without what is not restored.

    Raises:
        DamagedCheckpointError, CheckpointError: as `restore_path`.
    """
    check_part(path, target)
    return load(stores.place(path), target)[1]


def check_part(path: Place, target: Any) -> None:
    """Raises as `restore_part` does, without restoring anything."""
    run_on_first("checked", partial(check, stores.place(path), target, part=True))


def read_tensors(path: Place) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor of the checkpoint in this folder. Raises CheckpointError."""
    tensors: dict[str, dict[str, Any]] = manifest.read(stores.place(path))["tensors"]
    return tensors


def load_part(path: Place, target: Any) -> Any:
    """Reads a part of a checkpoint that was checked; see `restore_part`."""
    return load(stores.place(path), target)[1]


def check_whole(path: Place) -> None:
    """Raises CheckpointError unless the checkpoint is complete and undamaged."""
    manifest.check_files(path, manifest.read(path)["files"])


def check(path: Place, target: Any, *, part: bool = False) -> None:
    """Raises CheckpointError unless the checkpoint is complete, undamaged and fits `target`.

    part: the checkpoint may have more than `target`.
    """
    saved, wanted = manifest.read(path), manifest.shapes(manifest.by_name(target))
    manifest.check_files(path, saved["files"])
    tensors = saved["tensors"]
    if part:
        tensors = {name: each for name, each in tensors.items() if name in wanted}
    manifest.check_tensors(path, tensors, wanted)


def load(path: Place, target: Any) -> tuple[int, Any]:
    """Reads step and state, or a part of it, of a checkpoint that `check` accepted."""
    run_on_all("there", partial(require_seen, path))
    return load_here(path, target)


def load_here(path: Place, target: Any) -> tuple[int, Any]:
    """Reads as `load`, without asking whether all processes see the checkpoint."""
    wanted = manifest.by_name(target)
    saved = manifest.read(path)
    if pieces.index_files(saved["files"]):
        loaded = pieces.load(path, saved, wanted)
    elif isinstance(path, StorePath):
        raise CheckpointError(
            f"checkpoint {path} was saved on a disk and copied here; copy it to a disk to read it"
        )
    else:
        loaded = arrays.load(path / ARRAYS, wanted, checkpoint=path)
    state = jax.tree.unflatten(jax.tree.structure(target), [loaded[name] for name in wanted])
    return saved["step"], state
