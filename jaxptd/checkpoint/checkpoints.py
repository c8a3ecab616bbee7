"""Checkpoints of a run: written under a hidden name, renamed when complete, checked when read.

    directory/00000100/arrays/         the tensors, by orbax, as one flat {name: array}
    directory/00000100/manifest.json   step, description, tensors, size and CRC-32 of every file
    directory/.00000100.partial        being written or deleted; ignored, the next save removes it
    directory/.00000100.replaced       the old step 100, until a new step 100 has its name
    directory/00000100.aside           ignored: later than the best step, from which a run resumed

The manifest is written last and the folder renamed after that, so a folder is complete or ignored
whenever the process is killed. A tensor's name is its path in the state, such as
params.blocks.mlp.w. In a run of several processes, all call the same methods in the same order.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax

from jaxptd.checkpoint import manifest, saving, stored
from jaxptd.checkpoint.arrays import Background
from jaxptd.checkpoint.folders import CheckpointError, DamagedCheckpointError, Folders, reason
from jaxptd.checkpoint.saving import run_on_all, run_on_first
from jaxptd.checkpoint.stored import StoreFolders
from jaxptd.distributed.coordination import is_first
from jaxptd.stores import Place, StorePath, place

GRACE = 10.0  # seconds for a pending save when Ctrl-C ends the run
VALIDATION_LOSS = "validation_loss"

Reporter = Callable[[str], None]


class Checkpoints:
    """The checkpoints of a run, one folder for each step; created by the first save.

    As a context manager, waits for the pending save on exit.

    Args:
        directory: their folder, created with its parents; or a URL in a store, see `stored.py`.
        keep: number of newest checkpoints to keep, including the one just saved. Only complete
            ones count, and only these are deleted. One that `restore_newest` found damaged, or
            that has no manifest, stays for inspection until its step is saved again.
        keep_best: number of best checkpoints to keep as well.
        metric: the key of descriptions that ranks checkpoints, the lowest first.
        highest: the highest first.
        may_write: raises if another run has taken the store over; called before a manifest is
            written there, and before objects are deleted.
        saved: called after each save, in the thread that saves.
    """

    def __init__(
        self,
        directory: str | Place,
        *,
        keep: int,
        keep_best: int = 0,
        metric: str = VALIDATION_LOSS,
        highest: bool = False,
        may_write: Callable[[], None] = lambda: None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep}: use 1 or more")
        where = place(directory)
        self._folders: Folders | StoreFolders
        if isinstance(where, StorePath):
            self._folders = StoreFolders(where, may_write=may_write)
        else:
            self._folders = Folders(where)
        self._keep, self._keep_best, self._saved = keep, keep_best, saved
        self._metric, self._sign = metric, -1 if highest else 1
        self._damaged: set[int] = set()
        self._pending: Background | None = None

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
            elif self._pending is not None:
                self._pending.wait(GRACE)

    def steps(self) -> list[int]:
        """Steps whose checkpoint has a manifest, ascending; reads no file."""
        return self._folders.complete()

    def good_steps(self) -> list[int]:
        """The `steps` not found damaged by any restore so far, ascending."""
        return [step for step in self.steps() if step not in self._damaged]

    def best(self) -> int | None:
        """The step with the best metric, the newest among equals; None without one."""
        return next(iter(self._ranked(self.good_steps())), None)

    def save(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """Saves as `save_async` does, and waits for it."""
        self.save_async(step, state, description=description)
        self.wait()

    def save_async(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """Saves a state in the background, then deletes old checkpoints.

        The caller may change or donate the state at once. Waits for the previous save first. A
        checkpoint of the same step is replaced.

        Args:
            step: 0 or more.
            state: nested dict of jax arrays with any sharding.
            description: JSON values for `description` and `read_description`; a number under
                the name of `metric` among them ranks the checkpoint.

        Raises:
            CheckpointError: as `wait`, of the previous save or of this one.
        """
        self.wait()
        last = max(self.good_steps(), default=None)
        tensors = saving.savable(state)
        content = {"step": step, "description": description, "tensors": manifest.shapes(tensors)}
        with self._explained(step, last):
            write_rest = self._begin(step, tensors, content)

        def finish() -> None:
            with self._explained(step, last):
                write_rest()
            self._damaged.discard(step)
            self._delete_old(step)
            self._saved()

        self._pending = Background(finish)

    def _begin(
        self, step: int, tensors: dict[str, jax.Array], content: dict[str, Any]
    ) -> Callable[[], None]:
        """Copies what the next step may change; returns what writes the rest."""
        folders = self._folders
        if isinstance(folders, StoreFolders):
            upload = stored.start(folders, step, tensors)
            return partial(stored.finish, folders, content, upload)
        return partial(saving.finish, folders, content, saving.start(folders, step, tensors))

    def wait(self) -> None:
        """Waits until the checkpoint of the last `save_async` has its final name.

        Raises:
            CheckpointError: a process could not write it (disk full, no permission); it is removed
                and earlier checkpoints are unchanged.
        """
        if self._pending is None:
            return
        try:
            self._pending.wait()
        except Exception:
            self._pending = None
            raise
        self._pending = None  # skipped after Ctrl-C, when the save is still pending

    def restore(self, step: int, target: Any) -> Any:
        """Restores the state of a step, as `restore_path` does.

        Raises:
            CheckpointError: the step has no checkpoint, or it is damaged or does not fit `target`.
        """
        return saving.restore_path(self._folders.folder(step), target)[1]

    def restore_newest(self, target: Any, *, report: Reporter) -> tuple[int, Any] | None:
        """Restores step and state of the newest good checkpoint; None if there is none.

        Skips damaged ones and passes a line about each to `report`.

        Raises:
            CheckpointError: a good checkpoint does not fit `target`. It is not skipped, because
                resuming from an older one would silently discard the newest.
        """
        return self._restore_first(lambda: reversed(self._folders.all()), target, report)

    def restore_best(self, target: Any, *, report: Reporter) -> tuple[int, Any] | None:
        """Restores like `restore_newest`, but the checkpoint with the best metric.

        Reports every damaged one it finds, because that may be newer than the restored one.
        """
        return self._restore_first(
            lambda: self._ranked(self._folders.all(), report), target, report
        )

    def set_aside_after(self, step: int, *, report: Reporter) -> None:
        """Renames later checkpoints so that they are ignored, and reports their names.

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

        run_on_first("aside", rename)

    def description(self, step: int) -> dict[str, Any]:
        """The description saved with a step. Raises CheckpointError as `restore`."""
        return saving.read_description(self._folders.folder(step))

    def _restore_first(
        self, steps: Callable[[], Iterable[int]], target: Any, report: Reporter
    ) -> tuple[int, Any] | None:
        """Restores the first good checkpoint among some steps; process 0 chooses it for all."""
        unreadable = self._damaged if isinstance(self._folders, StoreFolders) else frozenset()

        def choose() -> str | None:
            for step in steps():
                if step in unreadable:
                    continue
                folder = self._folders.folder(step)
                try:
                    saving.check(folder, target)
                except DamagedCheckpointError as error:
                    self._damaged.add(step)
                    report(f"{error}; skipped")
                else:
                    return str(folder)
            return None

        while True:
            chosen = run_on_first("found", choose)
            if chosen is None:
                return None
            where = place(chosen)
            if not isinstance(where, StorePath):
                return saving.load(where, target)
            if (loaded := self._load_stored(where, target, report)) is not None:
                return loaded

    def _load_stored(
        self, where: StorePath, target: Any, report: Reporter
    ) -> tuple[int, Any] | None:
        """Loads a checkpoint whose objects are checked only now; None on all if one is damaged."""
        loaded: list[tuple[int, Any]] = []

        def load() -> str | None:
            try:
                loaded.append(saving.load_here(where, target))
            except DamagedCheckpointError as error:
                return str(error)
            return None

        faults = [fault for fault in run_on_all("loaded", load) if fault]
        if not faults:
            return loaded[0]
        self._damaged.add(int(where.name))
        if is_first():
            report(f"{faults[0]}; skipped")
        return None

    def _ranked(self, steps: Iterable[int], report: Reporter = lambda line: None) -> list[int]:
        """The given steps that have the metric, best first."""
        found = {}
        for step in steps:
            try:
                value = self.description(step).get(self._metric)
            except CheckpointError as error:
                self._damaged.add(step)
                report(f"{error}; skipped")
                continue
            if value is not None:
                found[step] = self._sign * value
        return sorted(found, key=lambda step: (found[step], -step))

    @contextlib.contextmanager
    def _explained(self, step: int, last: int | None) -> Iterator[None]:
        """Turns errors into a CheckpointError with the step, the folder and the last good step."""
        try:
            yield
        except Exception as error:
            kept = f"is step {last}" if last is not None else "is none: this was the first"
            raise CheckpointError(
                f"could not save step {step} in {self._folders.directory}: {reason(error)}; "
                f"the last good checkpoint {kept}"
            ) from error

    def _delete_old(self, saved: int) -> None:
        try:
            run_on_first("deleted", lambda: self._delete_all(self._old_steps(saved)))
        except Exception as error:
            where = self._folders.directory
            raise CheckpointError(f"saved step {saved} in {where}, but {reason(error)}") from error

    def _old_steps(self, saved: int) -> list[int]:
        """Good steps that are neither the saved one nor among those to keep."""
        others = [step for step in self.good_steps() if step != saved]
        best = self._ranked(self.good_steps())[: self._keep_best] if self._keep_best else []
        return [s for s in others[: max(0, len(others) - (self._keep - 1))] if s not in best]

    def _delete_all(self, steps: list[int]) -> None:
        for step in steps:
            try:
                self._folders.delete(step)
            except OSError as error:
                raise CheckpointError(
                    f"could not delete the old step {step}: {reason(error)}"
                ) from error
