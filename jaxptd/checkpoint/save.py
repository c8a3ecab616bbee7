"""One save: all processes write their shards into a hidden folder, then process 0 renames it.

`start` is as long as training waits; `finish` uses no device and may run in a thread.
"""

from pathlib import Path
from typing import Any

import jax

from jaxptd.checkpoint import disk, manifest
from jaxptd.checkpoint.agreement import run_on_all, run_on_first
from jaxptd.checkpoint.arrays import PendingWrite
from jaxptd.checkpoint.errors import CheckpointError
from jaxptd.checkpoint.folders import Folders
from jaxptd.distributed.coordination import is_first

ARRAYS = "arrays"


def start(folders: Folders, step: int, tensors: dict[str, jax.Array]) -> PendingWrite:
    """Creates the folder and copies what the next step may change. Raises what went wrong."""
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
    """Waits for the arrays, seals the folder and moves it into place. Raises what went wrong.

    Args:
        folders: in which `start` began.
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


def require_seen(folder: Path) -> None:
    """Raises CheckpointError if this process does not see a folder that process 0 sees."""
    if not folder.is_dir():
        raise CheckpointError(f"not every process sees {folder}; {manifest.SHARED}")


def _sync_files(folder: Path) -> dict[str, dict[str, int]]:
    return manifest.sync_files(folder, jax.process_index(), processes=jax.process_count())


def _remove_on_first(folder: Path) -> None:
    if is_first():
        disk.remove(folder)
