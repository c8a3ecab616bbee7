"""The run directory: the resolved config, checkpoints, and a line of metrics per logged step."""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxptd.atomic_files import explained, shown, write_whole
from jaxptd.config import Config, flat, option
from jaxptd.config.written import as_yaml, read_config
from jaxptd.distributed import coordination
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import UserError
from jaxptd.run.loggers import Loggers, Start, open_loggers, require_packages
from jaxptd.run.metrics import Metrics, Row, to_line
from jaxptd.run.store import CHECKPOINTS, StoreCopy
from jaxptd.stores import Place, StorePath, place

# Fields that a resumed run may change: they decide where and how fast the numbers are computed, not
# the numbers themselves. The exceptions are steps (where the decay ends) and skip_above (so that a
# run whose gradients exploded can resume).
_FREE_SECTIONS = frozenset({"layout", "checkpoint", "processes"})
_FREE = frozenset(
    {
        *(f"model.{name}" for name in ("remat", "remat_layers", "scan_layers", "vocab_multiple")),
        *("model.attention", "model.kernels"),
        *(
            f"train.{name}"
            for name in ("steps", "micro_batches", "log_every", "eval_every", "eval_batches")
        ),
        *(f"train.{name}" for name in ("sample_tokens", "run_dir", "platform", "max_skipped")),
        *("train.check_steps", "train.patience", "train.min_improvement"),
        *("train.loggers", "train.profile"),
        "optimizer.skip_above",
    }
)


def difference(config: Config, saved: Config) -> str | None:
    """Names the first field that makes two configs different runs; None if there is none.

    A null field of the model equals one that spells out what null stands for.
    """
    new, old = flat(config), flat(saved)
    for key in {**new, **old}:
        section, _, name = key.partition(".")
        value, was = new.get(key), old.get(key)
        if section in _FREE_SECTIONS or key in _FREE or value == was:
            continue
        spelled = section == "model" and None in (value, was)
        if not spelled or option(config.model, name) != option(saved.model, name):
            return f"{key} is {value}, was {was}"
    return None


def check_alike(config: Config, facts: dict[str, Any]) -> None:
    """Raises UserError, in all processes of a run, unless all have the same config and facts.

    Args:
        config: of this process.
        facts: other values that must be equal, by readable names.
    """
    fields = flat(config)
    source = fields.pop("data.source")  # each host may have its own copy of the data
    if fields["data.validation"] is not None:
        fields["data.validation"] = [*fields["data.validation"]]
    del fields["checkpoint.memory_dir"]  # and its own disk
    if isinstance(source, dict):
        facts = {"the weights of data.source": list(source.values())} | facts
    remedy = "give all processes the same config, data and train.run_dir"
    coordination.check_alike("alike", fields | facts, remedy=remedy)


BASE = "base"  # see `jaxptd.hf.base`


class RunDir:
    """Where the first process writes a run, on disk or in a store; the others only read there.

        config.yaml     the resolved config
        metrics.jsonl   one row per logged step
        tensorboard/    the same rows as events, next to the files of other loggers
        checkpoints/    see `jaxptd.checkpoint`
        run_id          see `jaxptd.checkpoint.memory`
        base/           files of the Hugging Face model that the run started from, for exports
        reference.npz   see `jaxptd.run.reference`

    Nothing is written before `open`.

    Args:
        path: of the directory, which need not exist, or its URL, see `store.py`.
        say: prints a line.
        may_write: raises if another run has taken a URL over.
    """

    def __init__(
        self,
        path: str | Place,
        *,
        say: Callable[[str], None] = lambda line: None,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.where = place(path, field="train.run_dir", say=say)
        self.may_write = may_write
        self._copy = (
            StoreCopy(self.where, say, may_write=may_write)
            if isinstance(self.where, StorePath)
            else None
        )
        self.path = self._copy.folder if self._copy else Path(str(self.where))
        self.checkpoints: Place = self.where / CHECKPOINTS
        self._config = self.path / "config.yaml"
        self._metrics = Metrics(self.path / "metrics.jsonl")
        self._loggers = Loggers([self._metrics], say)
        self._say = say
        self._rows: list[Row] = []  # of a run in a store: those that may not be there yet
        self._published = 0  # the last step whose row is there
        self._recovered: list[Row] = []

    @first_only
    def check(self, config: Config) -> None:
        """Raises UserError if the directory holds another run, or one that must not be resumed.

        Also raises if a logger's package is missing.
        """
        require_packages(config)
        has_checkpoints = self._copy.pull() if self._copy else False
        with run_dir_errors(self.path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(self.path)  # unlike `exists`, this raises for an impossible file name
            found = next(each for each in (self.path, *self.path.parents) if os.path.lexists(each))
            if not found.is_dir():
                raise UserError(
                    f"train.run_dir={shown(self.path)}: {shown(found)} is a file; name a directory"
                )
            has_config, saved = self._config.exists(), self.path / CHECKPOINTS
            has_checkpoints |= saved.exists()
            if has_config and not self._config.is_file():
                raise UserError(f"{shown(self._config)} is not a regular file; remove it")
            for each in (found, saved) if saved.exists() else (found,):
                if not os.access(each, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if config.checkpoint.resume == "never" and (has_config or has_checkpoints):
            raise UserError(
                f"train.run_dir={self.where} holds a run and checkpoint.resume is never; "
                "use another directory, or checkpoint.resume=auto"
            )
        changed = difference(config, read_config(self._config)) if has_config else None
        if changed:
            raise UserError(
                f"train.run_dir={self.where} holds another run: {changed}; "
                "use another directory, or that run's config"
            )

    @first_only
    def open(self, config: Config, *, step: int) -> None:
        """Makes the directory, writes the config, and drops the metrics of steps after `step`.

        A metrics file with lines that are not rows is kept under another name, with a warning.
        """
        with run_dir_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            rows, bad = self._metrics.read()
            if bad:
                self._say(
                    f"warning: {self._metrics.path} has lines that are no metrics ({bad}); "
                    f"kept it as {self._metrics.set_aside()} and continued with the good rows"
                )
            rows = [row for row in rows if row["step"] <= step]
            last = rows[-1]["step"] if rows else 0
            lacking = [row for row in self._recovered if row["step"] > last]
            kept = b"".join(map(to_line, rows))
            text = as_yaml(config)
            write_whole(
                {self._config: text.encode(), self._metrics.path: kept},
                lambda _: run_dir_errors(self.path),
            )
        start = Start(self.path, config, last if lacking else step, rows)
        self._loggers = Loggers([self._metrics, *open_loggers(start, self._say)], self._say)
        for row in lacking:
            self.log(row)
        self.publish()

    @first_only
    def log(self, row: Row) -> None:
        """Appends the metrics of one step; warns once about a file that cannot be written."""
        self._loggers.log(row)
        if self._copy is not None:
            self._rows = [*self.unpublished(), row]

    def unpublished(self) -> list[Row]:
        """The rows that may not be in the run's store yet; a state is saved with them.

        So no row is lost if the run is killed after the state was saved, before they are copied.
        """
        return [row for row in self._rows if row["step"] > self._published]

    def recover(self, rows: Sequence[Row]) -> None:
        """Takes the rows that a state was saved with; `open` logs those that the store lacks."""
        self._recovered = [*rows]

    def rows_until(self, step: int) -> list[Row]:
        """The rows that a run which resumes at a step goes on from."""
        rows = {row["step"]: row for row in (*self._recovered, *self.metrics())}
        return [rows[each] for each in sorted(rows) if each <= step]

    @first_only
    def close(self) -> None:
        """Ends the logs, after the last row."""
        self._loggers.close()
        self.publish()

    @first_only
    def publish(self) -> None:
        """Copies what has changed to the store, if the run is in one."""
        if self._copy is not None:
            last = self._rows[-1]["step"] if self._rows else 0
            if self._copy.publish():
                self._published = max(self._published, last)

    def metrics(self) -> list[Row]:
        """Every row logged so far, except lines cut short by a kill or a crash."""
        if self._copy is not None and not self._copy.pulled:
            self._copy.pull()
        return self._metrics.rows()


def run_dir_errors(path: Path) -> AbstractContextManager[None]:
    """Turns the system's errors inside into a `UserError` that names the run directory."""
    return explained(f"train.run_dir={shown(path)}", "use a writable directory")
