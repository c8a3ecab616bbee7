"""The checkpoints of a run: saves a state with its description, and chooses one to resume from."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from jaxptd.checkpoint import (
    CheckpointError,
    Checkpoints,
    read_description,
    restore_path,
)
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.checkpoint.folders import quoted
from jaxptd.checkpoint.memory import Memory, forget
from jaxptd.checkpoint.saving import run_on_first
from jaxptd.config import CheckpointConfig, Config, from_dict, to_dict
from jaxptd.config.training import VALIDATION_LOSS
from jaxptd.data.batches import Identity, change
from jaxptd.distributed.liveness import RESUME
from jaxptd.errors import UserError
from jaxptd.run.evaluation import evaluation_of, metrics_of, rises
from jaxptd.run.folder import Row, RunDir, difference
from jaxptd.step import Program, State
from jaxptd.stores import StorePath, place

# Keys in a state's description:
DATA = "data"  # the identity of the run's data
ROWS = "rows"  # of metrics, those that were not in the run's store yet


@dataclasses.dataclass(frozen=True)
class RunCheckpoints:
    """Saves and resumes a run.

    Args:
        program: makes the state.
        run_dir: contains the checkpoints.
        say: prints a line.
        data: the identity of the run's data. Empty if unknown.
    """

    program: Program
    run_dir: RunDir
    say: Callable[[str], None]
    data: Identity = dataclasses.field(default_factory=dict)

    @cached_property
    def store(self) -> Checkpoints:
        """All checkpoints of this run, and the pending save."""
        settings = self._settings
        metric = settings.best_metric
        return Checkpoints(
            self.run_dir.checkpoints,
            keep=settings.keep,
            keep_best=settings.keep_best,
            metric=metric,
            highest=rises(metric),
            may_write=self.run_dir.may_write,
            saved=self.run_dir.publish,
        )

    @cached_property
    def memory(self) -> Memory | None:
        """The states on the hosts themselves; None if none are kept."""
        settings = self._settings
        if not settings.memory_every:
            return None
        where = self.run_dir.where
        return Memory(
            settings.memory_dir,
            self.run_dir.path,
            warn=warn_from_here,
            url=str(where) if isinstance(where, StorePath) else None,
            publish=self.run_dir.publish,
        )

    @property
    def _settings(self) -> CheckpointConfig:
        return self.program.config.checkpoint

    def save(self, state: State, step: int, row: Row | None) -> None:
        """Saves the state after a step, with the metrics of its evaluation if its row has one."""
        description = self._description() | evaluation_of(row or {})
        canonical = to_canonical(self.program, state)
        save = self.store.save_async if self._settings.asynchronous else self.store.save
        save(step, canonical, description=description)

    def keep(self, state: State, step: int) -> None:
        """Keeps the state after a step in the hosts' memory, in the background."""
        if self.memory is not None:
            canonical = to_canonical(self.program, state)
            self.memory.save_async(step, canonical, description=self._description())

    def _description(self) -> dict[str, Any]:
        data = {DATA: self.data} if self.data else {}
        rows = {ROWS: found} if (found := self.run_dir.unpublished()) else {}
        return {"config": to_dict(self.program.config), **data, **rows}

    @contextlib.contextmanager
    def keeping(self, state: State, step: int) -> Iterator[None]:
        """States may be kept in memory inside; they go once the last step's is in the store.

        The state that a run resumes from is kept first: all hosts of this start then have their
        parts of it, also if a host was lost or their number has changed.
        """
        memory = self.memory
        if memory is None:
            yield
            return
        with contextlib.closing(memory):
            if step > 0:
                self.keep(state, step)
            yield
            memory.wait()
            if self._newest_saved("memory.ended") >= memory.newest:
                memory.remove()

    def complete(self, state: State, step: int) -> None:
        """Saves the last step's state if only the hosts' memory has it: the run died before."""
        wanted = self.memory is not None and self._settings.every > 0
        if not wanted or self._newest_saved("memory.complete") >= step:
            return
        with self.keeping(state, step):
            self.save(state, step, None)
            self.store.wait()

    def _newest_saved(self, name: str) -> int:
        """The step of the newest checkpoint, -1 without one; name: of this question."""
        return run_on_first(name, lambda: max(self.store.steps(), default=-1))

    def good_steps(self) -> list[int]:
        """Steps of the good checkpoints, once the pending save has ended or failed."""
        with contextlib.suppress(CheckpointError):
            self.store.wait()
        return self.store.good_steps()

    def begin(self, step: int) -> None:
        """Moves later checkpoints aside if the run resumes from its best one.

        States in memory from which the run does not resume are deleted. Call it after all other
        checks, because it changes files.

        Raises:
            CheckpointError: a checkpoint cannot be renamed, or `memory_dir` cannot be written.
        """
        if self.memory is not None:
            self.memory.begin()
        else:
            forgotten = partial(forget, self.run_dir.path, self.run_dir.publish)
            run_on_first("memory.forgotten", forgotten)
        if self._settings.resume == "best":
            self.store.set_aside_after(step, report=self._warn)

    def start(self, new: Callable[[], State] | None = None) -> State:
        """The state to resume from: a checkpoint's, or a new one.

        Args:
            new: makes a new state. None uses the program.

        Raises:
            UserError: the checkpoint belongs to another run, or there is none to resume from.
        """
        resume, new = self._settings.resume, new or self.program.init_state
        if resume == "never":
            return new()
        target = abstract_canonical(self.program)
        if resume == "auto":
            return self._start_from_newest(target) or new()
        if resume == "best":
            return self._start_from_best(target)
        where = place(resume, field="checkpoint.resume", say=self._warn)
        description = read_description(where)
        self._check_same_run(resume, description)
        step, canonical = restore_path(where, target)
        self._check_nothing_newer(step)
        self._check_same_data(step, description)
        return self._restored(step, canonical, resume)

    def _start_from_newest(self, target: dict[str, Any]) -> State | None:
        """The newest good state, of memory or of the store; None without one."""
        newest = self._newest_saved("memory.newest")
        if (state := self._start_from_memory(target, after=newest)) is not None:
            return state
        stored = self.store.restore_newest(target, report=self._warn)
        step = stored[0] if stored else -1
        if step < newest:  # the newest checkpoint is damaged
            state = self._start_from_memory(target, after=step)
        return self._stored(*stored) if stored and state is None else state

    def _start_from_memory(self, target: dict[str, Any], *, after: int) -> State | None:
        """The newest state in memory, if it is of a later step than `after`."""
        if self.memory is None:
            return None
        found = self.memory.restore_newest(target, after=after, report=self._warn)
        if found is None:
            return None
        return self._resumed(found.step, found.state, found.where, found.description)

    def _start_from_best(self, target: dict[str, Any]) -> State:
        best = self.store.restore_best(target, report=self._warn)
        if best is None:
            raise UserError(
                f"checkpoint.resume=best, but no good checkpoint in {self.run_dir.checkpoints} has "
                f"a {self._settings.best_metric}; use checkpoint.resume=auto"
            )
        return self._stored(*best)

    def _stored(self, step: int, canonical: dict[str, Any]) -> State:
        where, description = str(self.run_dir.checkpoints), self.store.description(step)
        return self._resumed(step, canonical, where, description)

    def _resumed(
        self, step: int, canonical: dict[str, Any], where: str, description: dict[str, Any]
    ) -> State:
        """A state of this run, and the rows it was saved with."""
        self._check_same_run(where, description)
        self._check_same_data(step, description)
        self.run_dir.recover(description.get(ROWS, ()))
        return self._restored(step, canonical, where)

    def _restored(self, step: int, canonical: dict[str, Any], where: str) -> State:
        self.say(f"resuming at step {step} from {where}")
        return from_canonical(self.program, canonical)

    def _check_same_run(self, where: str, description: dict[str, Any]) -> None:
        changed = difference(self.program.config, saved_config(where, description))
        if changed:
            raise UserError(f"{where} belongs to another run: {changed}; use that run's config")

    def _check_same_data(self, step: int, description: dict[str, Any]) -> None:
        """Raises UserError, or warns if that is allowed, if the run's data has changed since."""
        before = description.get(DATA)
        if not self.data or (before is None and step == 0):
            return
        if before is None:
            self.say("the checkpoint does not record which data its run was trained on")
            return
        changed = change(self.data, before)
        if changed and self._settings.data == "same":
            raise UserError(
                f"{changed} when the run was saved; restore the data, or accept the new data with "
                "checkpoint.data=any"
            )
        if changed:
            self.say(f"warning: {changed} when the run was saved")

    def _check_nothing_newer(self, step: int) -> None:
        newest = max(self.store.steps(), default=step)
        if newest > step:
            raise UserError(
                f"train.run_dir={self.run_dir.where} holds step {newest}, checkpoint.resume names "
                f"step {step}; use checkpoint.resume=auto, or another train.run_dir"
            )

    def _warn(self, line: str) -> None:
        self.say(f"warning: {line}")


def saved_config(where: str, description: dict[str, Any]) -> Config:
    """The config of the run that saved a checkpoint.

    Args:
        where: path of the checkpoint, or of the folder with all of them.
        description: the checkpoint's description.

    Raises:
        CheckpointError: the description has no config that this version can read.
    """
    try:
        return from_dict(description["config"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"no {error}" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"checkpoint {where} does not say which run it belongs to ({quoted(str(cause))}); use "
            "another checkpoint, or the version of jaxptd that saved it"
        ) from error


def require_metric(config: Config) -> None:
    """Raises UserError if no evaluation measures `checkpoint.best_metric`.

    The default may be missing, unless `train.patience` needs it.
    """
    metric, measured = config.checkpoint.best_metric, metrics_of(config)
    patience = config.train.patience
    if metric == VALIDATION_LOSS and not patience:
        return
    if metric not in measured:
        remedy = f"use one of {', '.join(measured)}" if measured else "set data.validation"
        waits = f"train.patience={patience} with " if patience else ""
        raise UserError(
            f"{waits}checkpoint.best_metric={metric}: no evaluation measures it; {remedy}"
        )
    if not config.train.eval_every:
        raise UserError(
            f"checkpoint.best_metric={metric} with train.eval_every=0: nothing is evaluated; "
            "leave one of them out"
        )


def without_best(config: Config) -> str | None:
    """A warning if no checkpoint, or none before the last, will have the best metric, else None."""
    every, evaluated = config.checkpoint.every, config.train.eval_every
    if (metric := config.checkpoint.best_metric) not in (measured := metrics_of(config)):
        return (
            f"warning: checkpoint.keep_best={config.checkpoint.keep_best} finds no checkpoint: "
            f"nothing is held out for {metric}; use checkpoint.best_metric={measured[0]}, or "
            "checkpoint.keep_best=0"
        ) * bool(config.checkpoint.keep_best and every and evaluated)
    if not (config.checkpoint.keep_best and every and evaluated) or every >= config.train.steps:
        return None
    if math.lcm(every, evaluated) < config.train.steps:
        return None
    return (
        f"warning: checkpoint.keep_best={config.checkpoint.keep_best} finds no checkpoint before "
        f"the last: none is evaluated; make checkpoint.every={every} a multiple of "
        f"train.eval_every={evaluated}, or checkpoint.keep_best=0"
    )


@contextlib.contextmanager
def failed_saves_explained() -> Iterator[None]:
    """Turns the error of a failed save into one with a remedy."""
    try:
        yield
    except CheckpointError as error:
        raise UserError(
            f"{error}; fix that (free some space, for example), then {RESUME}"
        ) from error


def warn_from_here(line: str) -> None:
    """Prints a warning of any process; the display shows only those of the first."""
    print(line, file=sys.stderr, flush=True)
