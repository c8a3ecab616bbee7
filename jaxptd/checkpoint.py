"""Checkpoints of a run: written aside, moved into place whole, checked when read, onto any mesh.

    directory/00000100/arrays/         the tensors, by orbax, as one flat {name: array}
    directory/00000100/manifest.json   step, description, tensors, size and CRC-32 of every file
    directory/.00000100.partial        being written or deleted; never counts, goes at the next save
    directory/.00000100.replaced       the old step 100 until a new step 100 is in its place

The manifest is written last and the folder then renamed, so a folder either has everything or does
not count, whenever the process is killed. A tensor's name is its path in the state, as in
params.blocks.mlp.w. The only file that imports orbax (its v1 interface).
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxptd import checkpoint_files as files
from jaxptd.checkpoint_files import CheckpointError, DamagedCheckpointError, reason

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # orbax 0.12 still keeps its v1 interface here
    from orbax.checkpoint.experimental import v1 as ocp

ARRAYS = "arrays"
PATIENCE = 60.0  # seconds that a write may still take after another one failed
SETTLE = 0.5  # seconds for tensorstore's own threads, which cannot be waited for

__all__ = ["CheckpointError", "Checkpoints", "read_description", "restore_path"]


class Checkpoints:
    """The checkpoints of a run, one folder a step. Creates nothing until the first save.

    Args:
        directory: where they are; its parents are created too.
        keep: newest checkpoints kept. The one just saved always stays. Only complete ones count and
            only they are deleted: one found damaged by `restore_newest`, or without its manifest,
            stays for a person to look at (until its step is saved again).
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep} must be above 0")
        self._directory = Path(directory)
        self._keep = keep
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint (it has its manifest; files are not read), ascending."""
        folders = self._folders().items()
        return [step for step, folder in folders if (folder / files.MANIFEST).is_file()]

    def save(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """Saves a state, then deletes what is more than `keep`. Saving a step again replaces it.

        Args:
            step: 0 or more.
            state: nested dict of jax arrays, sharded in any way.
            description: anything JSON can hold, for `description` and `read_description`.

        Raises:
            CheckpointError: it cannot be written (disk full, no permission); earlier checkpoints
                are as they were and nothing of this one is left.
        """
        last = max(self._good_steps(), default=None)
        tensors = _savable(state)
        content = {"step": step, "description": description, "tensors": files.shapes(tensors)}
        partial = self._hidden(step, "partial")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            partial.mkdir()
            _save_arrays(partial / ARRAYS, tensors)
            files.seal(partial, content)
            self._move_into_place(step)
        except Exception as error:
            kept = f"is step {last}" if last is not None else "is none: this was the first"
            raise CheckpointError(
                f"could not save step {step} in {self._directory}: {reason(error)}; "
                f"the last good checkpoint {kept}"
            ) from error
        finally:
            files.remove(partial)
        self._damaged.discard(step)
        self._delete_old(step)

    def restore(self, step: int, target: Any) -> Any:
        """The state of a step, as `restore_path`.

        Raises:
            CheckpointError: there is no such step, it is damaged, or it does not fit `target`.
        """
        return restore_path(self._folder(step), target)[1]

    def restore_newest(
        self, target: Any, *, report: Callable[[str], None]
    ) -> tuple[int, Any] | None:
        """Step and state of the newest good checkpoint, or None if there is none.

        Each damaged one on the way is named to `report` in one line and skipped.

        Raises:
            CheckpointError: a good checkpoint does not fit `target`. It is not skipped: going on
                from an older one, or from nothing, would throw away the newest in silence.
        """
        for step, folder in reversed(self._folders().items()):
            try:
                return restore_path(folder, target)
            except DamagedCheckpointError as error:
                self._damaged.add(step)
                report(f"{error}; skipped")
        return None

    def description(self, step: int) -> dict[str, Any]:
        """What `save` was given with this step. Raises CheckpointError as `restore`."""
        return read_description(self._folder(step))

    def _good_steps(self) -> list[int]:
        """Complete and not found damaged, as far as is known without reading them."""
        return [step for step in self.steps() if step not in self._damaged]

    def _folders(self) -> dict[int, Path]:
        """Folder of each step, complete or not, ascending."""
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self._directory}: {reason(error)}"
            ) from error
        found = {}
        for name in sorted(names):  # "." sorts first: once there is a new step, that one counts
            match = re.fullmatch(rf"({files.STEP})|\.({files.STEP})\.replaced", name)
            if match and (self._directory / name).is_dir():
                found[int(match[1] or match[2])] = self._directory / name
        return dict(sorted(found.items()))

    def _folder(self, step: int) -> Path:
        folders = self._folders()
        if step not in folders:
            there = f"it has steps {', '.join(map(str, folders))}" if folders else "it has none"
            raise CheckpointError(f"no checkpoint of step {step} in {self._directory}; {there}")
        return folders[step]

    def _final(self, step: int) -> Path:
        return self._directory / f"{step:08d}"

    def _hidden(self, step: int, kind: str) -> Path:
        return self._directory / f".{step:08d}.{kind}"

    def _clear_leftovers(self) -> None:
        """Removes what a killed save left; a step that lost its place to nothing gets it back."""
        for path in self._directory.iterdir():
            match = re.fullmatch(rf"\.({files.STEP})\.(partial|replaced)", path.name)
            if match and match[2] == "replaced" and not self._final(int(match[1])).exists():
                path.rename(self._final(int(match[1])))
            elif match:
                files.remove(path)

    def _move_into_place(self, step: int) -> None:
        final, replaced = self._final(step), self._hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)  # a folder cannot be renamed onto one that is not empty
        self._hidden(step, "partial").rename(final)
        files.sync_folder(self._directory)
        files.remove(replaced)

    def _delete_old(self, saved: int) -> None:
        others = [step for step in self._good_steps() if step != saved]
        for step in others[: max(0, len(others) - (self._keep - 1))]:
            doomed = self._hidden(step, "partial")
            try:
                self._final(step).rename(doomed)  # killed while deleting, it does not look damaged
            except OSError as error:
                raise CheckpointError(
                    f"saved step {saved} in {self._directory}, but could not delete the old "
                    f"step {step}: {reason(error)}"
                ) from error
            files.remove(doomed)


def read_description(path: Path) -> dict[str, Any]:
    """What `save` was given with the checkpoint in this folder. Raises CheckpointError."""
    return files.read_manifest(Path(path))["description"]


def restore_path(path: Path, target: Any) -> tuple[int, Any]:
    """Step and state of the checkpoint in this folder, all of its files checked first.

    Args:
        path: the folder of one step.
        target: the state as jax.ShapeDtypeStruct with sharding (none: the first device); the mesh
            and the sharding may be others than those it was saved with.

    Raises:
        DamagedCheckpointError: a file is missing, cut short or changed.
        CheckpointError: a tensor's name, shape or dtype is another than in `target`.
    """
    path = Path(path)
    manifest = files.read_manifest(path)
    files.check_files(path, manifest["files"])
    wanted = files.by_name(target)
    files.check_tensors(path, manifest["tensors"], files.shapes(wanted))
    arrays = _load_arrays(path, wanted)
    state = jax.tree.unflatten(jax.tree.structure(target), [arrays[name] for name in wanted])
    return manifest["step"], state


def _savable(state: Any) -> dict[str, jax.Array]:
    """The tensors by name, refused here if orbax could not save them."""
    if jax.process_count() > 1:
        raise CheckpointError(
            f"{jax.process_count()} processes: checkpoints are saved by one process so far"
        )
    named = files.by_name(state)
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No lines on the console from orbax: what matters is an exception, then one line of ours."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    outer_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:  # a write that ends after orbax gave up on all of them
        if str(unraisable.exc_value) != "Event loop is closed":
            outer_hook(unraisable)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = hook
    try:
        yield
        sys.unraisablehook = outer_hook  # but after a failure it stays: nothing says when all ended
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _save_arrays(path: Path, tensors: dict[str, jax.Array]) -> None:
    context = ocp.Context()
    # At once: asynchronously, an early failure leaves a coroutine that warns of not being awaited.
    context.asynchronous.create_directories_asynchronously = False
    with _quiet(), context:
        try:
            ocp.save(path.absolute(), tensors)
        except BaseException:
            _wait_for_writers()
            raise


def _wait_for_writers() -> None:
    """When one write fails orbax leaves the others behind, to write into what is removed next."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(PATIENCE)
    time.sleep(SETTLE)


def _load_arrays(folder: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    first_device = SingleDeviceSharding(jax.devices()[0])
    shardings = {name: getattr(x, "sharding", None) or first_device for name, x in wanted.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in wanted.items()
    }
    with _quiet():
        try:
            arrays = ocp.load((folder / ARRAYS).absolute(), abstract)
        except Exception as error:  # its files are whole: another orbax, too little memory
            raise CheckpointError(f"could not read checkpoint {folder}: {reason(error)}") from error
    for name, x in wanted.items():
        if arrays[name].dtype != x.dtype:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is {x.dtype}, jax made it {arrays[name].dtype}; "
                'call jax.config.update("jax_enable_x64", True)'
            )
    return arrays
