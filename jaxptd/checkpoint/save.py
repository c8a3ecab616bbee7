"""One save: every process writes its own parts into one folder; it counts when all have.

`start` is the part that training waits for; `finish` may run in a thread: no device takes part.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxptd.checkpoint import manifest as files
from jaxptd.checkpoint.agreement import agreed, by_first
from jaxptd.checkpoint.arrays import ArraysBeingWritten
from jaxptd.checkpoint.folders import Folders
from jaxptd.checkpoint.manifest import CheckpointError, reason
from jaxptd.distributed.coordination import is_first

ARRAYS = "arrays"


def start(folders: Folders, step: int, tensors: dict[str, jax.Array]) -> ArraysBeingWritten:
    """Makes the folder and copies what the next step changes. Raises what went wrong."""
    folder = folders.partial(step)
    by_first("made", lambda: folders.make_partial(step))
    arrays: list[ArraysBeingWritten] = []
    try:
        agreed("seen", lambda: require_seen(folder))
        agreed(
            "copied",
            lambda: arrays.append(ArraysBeingWritten(folder / ARRAYS, tensors)),
        )
    except BaseException:
        for each in arrays:
            each.give_up()
        _remove(folder)
        raise
    return arrays[0]


def finish(folders: Folders, content: dict[str, Any], arrays: ArraysBeingWritten) -> None:
    """Waits for the arrays, seals the folder and moves it into place. Raises what went wrong."""
    step = content["step"]
    folder = folders.partial(step)
    try:
        agreed("written", arrays.wait)
        agreed("merged", arrays.end)
        part = partial(files.put_on_disk, folder, jax.process_index())
        shares = agreed("on_disk", partial(part, processes=jax.process_count()))
        found = {name: held for share in shares for name, held in share.items()}
        by_first("sealed", lambda: files.seal(folder, content, found))
        by_first("placed", lambda: folders.move_into_place(step))
    except Exception:
        arrays.give_up()
        raise
    finally:
        _remove(folder)


def require_seen(folder: Path) -> None:
    """Raises CheckpointError if this process does not see a folder that the first one sees."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there for every process; {files.SHARED}")


def _remove(folder: Path) -> None:
    if is_first():
        files.remove(folder)


def delete(folders: Folders, steps: Callable[[], list[int]]) -> None:
    """Deletes old checkpoints. Raises CheckpointError, on all processes, if one stays."""

    def each() -> None:
        for step in steps():
            try:
                folders.delete(step)
            except OSError as error:
                raise CheckpointError(
                    f"could not delete the old step {step}: {reason(error)}"
                ) from error

    by_first("deleted", each)
