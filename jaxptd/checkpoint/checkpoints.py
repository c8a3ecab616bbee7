"""Checkpoints of a run: written aside, moved into place whole, checked when read, onto any mesh.

    directory/00000100/arrays/         the tensors, by orbax, as one flat {name: array}
    directory/00000100/manifest.json   step, description, tensors, size and CRC-32 of every file
    directory/.00000100.partial        being written or deleted; never counts, goes at the next save
    directory/.00000100.replaced       the old step 100 until a new step 100 is in its place
    directory/00000100.aside           was later than the best one, from which a run went on

The manifest is written last and the folder then renamed, so a folder either has everything or does
not count, whenever the process is killed. A tensor's name is its path in the state, as in
params.blocks.mlp.w. In a run of many processes all of them call the same methods in the same order.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from jaxptd.checkpoint import arrays
from jaxptd.checkpoint import manifest as files
from jaxptd.checkpoint import save as writer
from jaxptd.checkpoint.agreement import agreed, by_first
from jaxptd.checkpoint.background import Background
from jaxptd.checkpoint.folders import Folders
from jaxptd.checkpoint.manifest import CheckpointError, DamagedCheckpointError, reason

GRACE = 10.0  # seconds for the save that goes on when Ctrl-C ends the run at once
VALIDATION_LOSS = "validation_loss"  # of a description: what makes a checkpoint the best

__all__ = ["CheckpointError", "Checkpoints", "read_description", "restore_path"]

Report = Callable[[str], None]


class Checkpoints:
    """The checkpoints of a run, one folder a step. Creates nothing until the first save.

    `with` it waits at the end for the save that goes on.

    Args:
        directory: where they are; its parents are created too.
        keep: newest checkpoints kept. The one just saved always stays. Only complete ones count and
            only they are deleted: one found damaged by `restore_newest`, or without its manifest,
            stays for a person to look at (until its step is saved again).
        keep_best: those with the lowest validation loss, kept too.
    """

    def __init__(self, directory: Path, *, keep: int, keep_best: int = 0) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep} must be above 0")
        self._folders = Folders(directory)
        self._keep, self._keep_best = keep, keep_best
        self._damaged: set[int] = set()
        self._saving: Background | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        with contextlib.suppress(CheckpointError):
            if isinstance(error, Exception):
                self.wait()
            elif self._saving is not None:
                self._saving.wait(GRACE)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint (it has its manifest; files are not read), ascending."""
        folders = self._folders.all().items()
        return [step for step, folder in folders if (folder / files.MANIFEST).is_file()]

    def best(self) -> int | None:
        """The step with the lowest validation loss (of equal ones the newest); None without any."""
        return next(iter(self._best()), None)

    def save(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """`save_async`, waited for."""
        self.save_async(step, state, description=description)
        self.wait()

    def save_async(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """Saves a state while the caller goes on, then deletes old ones. A step again replaces it.

        The state may be changed or donated when this returns. It waits for the save before it.

        Args:
            step: 0 or more.
            state: nested dict of jax arrays, sharded in any way.
            description: anything JSON can hold, for `description` and `read_description`; with the
                number validation_loss it can be the best one.

        Raises:
            CheckpointError: as `wait`, of the save before it, or of this one.
        """
        self.wait()
        last = max(self.good_steps(), default=None)
        tensors = _savable(state)
        content = {"step": step, "description": description, "tensors": files.shapes(tensors)}
        with self._explained(step, last):
            writing = writer.start(self._folders, step, tensors)

        def finish() -> None:
            with self._explained(step, last):
                writer.finish(self._folders, content, writing)
            self._damaged.discard(step)
            self._delete_old(step)

        self._saving = Background(finish)

    def wait(self) -> None:
        """Waits until what `save_async` saves is in its place.

        Raises:
            CheckpointError: it cannot be written (disk full, no permission), on any process;
                earlier checkpoints are as they were and nothing of this one is left.
        """
        if self._saving is None:
            return
        try:
            self._saving.wait()
        except Exception:
            self._saving = None
            raise
        self._saving = None  # not if a person interrupts: what is saved still goes on

    def restore(self, step: int, target: Any) -> Any:
        """The state of a step, as `restore_path`.

        Raises:
            CheckpointError: there is no such step, it is damaged, or it does not fit `target`.
        """
        return restore_path(self._folders.folder(step), target)[1]

    def restore_newest(self, target: Any, *, report: Report) -> tuple[int, Any] | None:
        """Step and state of the newest good checkpoint, or None if there is none.

        Each damaged one on the way is named to `report` in one line and skipped.

        Raises:
            CheckpointError: a good checkpoint does not fit `target`. It is not skipped: going on
                from an older one, or from nothing, would throw away the newest in silence.
        """
        return self._restore(lambda: reversed(self._folders.all()), target, report)

    def restore_best(self, target: Any, *, report: Report) -> tuple[int, Any] | None:
        """As `restore_newest`, of those with a validation loss in the order of `best`."""
        return self._restore(lambda: self._best(report), target, report)

    def set_aside_after(self, step: int, *, report: Report) -> None:
        """Renames later checkpoints, so that they do not count any more; names them to `report`.

        Raises:
            CheckpointError: one cannot be renamed.
        """

        def rename() -> None:
            for later in [each for each in self._folders.all() if each > step]:
                try:
                    aside = self._folders.set_aside(later)
                except OSError as error:
                    raise CheckpointError(
                        f"could not set step {later} of {self._folders.directory} aside: "
                        f"{reason(error)}"
                    ) from error
                report(f"step {later} is later than step {step}: moved to {aside}")

        by_first("aside", rename)

    def description(self, step: int) -> dict[str, Any]:
        """What `save` was given with this step. Raises CheckpointError as `restore`."""
        return read_description(self._folders.folder(step))

    def _restore(
        self, steps: Callable[[], Iterable[int]], target: Any, report: Report
    ) -> tuple[int, Any] | None:
        """The first good one; the first process looks, and all take what it found."""

        def look() -> str | None:
            for step in steps():
                folder = self._folders.folder(step)
                try:
                    _check(folder, target)
                except DamagedCheckpointError as error:
                    self._damaged.add(step)
                    report(f"{error}; skipped")
                else:
                    return str(folder)
            return None

        found = by_first("found", look)
        return None if found is None else _load(Path(found), target)

    def _best(self, report: Report = lambda line: None) -> list[int]:
        """Steps with a validation loss, the lowest first."""
        losses = {}
        for step in self.good_steps():
            try:
                loss = self.description(step).get(VALIDATION_LOSS)
            except CheckpointError as error:
                self._damaged.add(step)
                report(f"{error}; skipped")
                continue
            if loss is not None:
                losses[step] = loss
        return sorted(losses, key=lambda step: (losses[step], -step))

    def good_steps(self) -> list[int]:
        """Complete and not found damaged, as far as is known without reading them."""
        return [step for step in self.steps() if step not in self._damaged]

    @contextlib.contextmanager
    def _explained(self, step: int, last: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kept = f"is step {last}" if last is not None else "is none: this was the first"
            raise CheckpointError(
                f"could not save step {step} in {self._folders.directory}: {reason(error)}; "
                f"the last good checkpoint {kept}"
            ) from error

    def _delete_old(self, saved: int) -> None:
        def old() -> list[int]:
            others = [step for step in self.good_steps() if step != saved]
            best = self._best()[: self._keep_best] if self._keep_best else []
            return [s for s in others[: max(0, len(others) - (self._keep - 1))] if s not in best]

        try:
            writer.delete(self._folders, old)
        except Exception as error:
            where = self._folders.directory
            raise CheckpointError(f"saved step {saved} in {where}, but {reason(error)}") from error


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
    by_first("checked", partial(_check, path, target))
    return _load(path, target)


def _check(path: Path, target: Any) -> None:
    """Raises CheckpointError unless the checkpoint is whole and fits."""
    manifest = files.read_manifest(path)
    files.check_files(path, manifest["files"])
    files.check_tensors(path, manifest["tensors"], files.shapes(files.by_name(target)))


def _load(path: Path, target: Any) -> tuple[int, Any]:
    """Step and state of a checkpoint that has been checked."""
    agreed("there", partial(writer.require_seen, path))
    wanted = files.by_name(target)
    found = arrays.load(path / writer.ARRAYS, wanted, of=path)
    state = jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])
    return files.read_manifest(path)["step"], state


def _savable(state: Any) -> dict[str, jax.Array]:
    """The tensors by name, refused here if orbax could not save them."""
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
