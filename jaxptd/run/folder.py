"""The run directory: the resolved config, checkpoints, and a line of metrics a logged step."""

import contextlib
import errno
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from jaxptd.atomic_files import explained, write_whole
from jaxptd.config import Config, to_dict
from jaxptd.config.command_line import load_config
from jaxptd.distributed import coordination
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import UserError
from jaxptd.run.tensorboard import TensorBoard

Row = dict[str, Any]

# Fields that a resumed run may change: they decide where and how fast the numbers are computed, not
# the numbers. Exceptions: steps, where the decay ends, and skip_above, with which a run whose
# gradients exploded can resume.
_FREE_SECTIONS = frozenset({"layout", "checkpoint", "processes"})
_FREE = frozenset(
    {
        *(f"model.{name}" for name in ("remat", "remat_layers", "attention", "scan_layers")),
        "model.vocab_multiple",
        *(
            f"train.{name}"
            for name in ("steps", "micro_batches", "log_every", "eval_every", "eval_batches")
        ),
        *(f"train.{name}" for name in ("sample_tokens", "run_dir", "platform", "max_skipped")),
        "optimizer.skip_above",
    }
)


def difference(config: Config, saved: Config) -> str | None:
    """Names the first field that makes two configs different runs; None if there is none."""
    old = to_dict(saved)
    for section, fields in to_dict(config).items():
        for name, value in fields.items():
            key = f"{section}.{name}"
            if section not in _FREE_SECTIONS and key not in _FREE and value != old[section][name]:
                return f"{key} is {value}, was {old[section][name]}"
    return None


def check_alike(config: Config, facts: dict[str, Any]) -> None:
    """Raises UserError, in all processes of a run, unless all have the same config and facts.

    Args:
        config: of this process.
        facts: other values that must be equal, by names for a person.
    """
    fields = {
        f"{s}.{name}": x for s, section in to_dict(config).items() for name, x in section.items()
    }
    del fields["data.source"]  # each host may have its own copy
    remedy = "give all processes the same config, data and train.run_dir"
    coordination.check_alike("alike", fields | facts, remedy=remedy)


class RunDir:
    """Where the first process writes a run; the other processes only read there.

        config.yaml     the resolved config
        metrics.jsonl   one row a logged step
        tensorboard/    the same rows as events, if tensorboardX is installed
        checkpoints/    see `jaxptd.checkpoint`

    Nothing is written before `open`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._config, self._metrics = self.path / "config.yaml", self.path / "metrics.jsonl"
        self._board: TensorBoard | None = None

    @first_only
    def check(self, config: Config) -> None:
        """Raises UserError if the directory holds another run, or one that must not be resumed."""
        with _explained(self.path):
            found = next(each for each in (self.path, *self.path.parents) if each.exists())
            if not found.is_dir():
                raise UserError(f"train.run_dir={self.path}: {found} is a file; name a directory")
            if not os.access(found, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            has_config, has_checkpoints = self._config.exists(), self.checkpoints.exists()
        if config.checkpoint.resume == "never" and (has_config or has_checkpoints):
            raise UserError(
                f"train.run_dir={self.path} holds a run and checkpoint.resume is never; "
                "use another directory, or checkpoint.resume=auto"
            )
        changed = difference(config, load_config(self._config)) if has_config else None
        if changed:
            raise UserError(
                f"train.run_dir={self.path} holds another run: {changed}; "
                "use another directory, or that run's config"
            )

    @first_only
    def open(self, config: Config, *, step: int) -> None:
        """Makes the directory, writes the config, and drops the metrics of steps after `step`."""
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(self._config, yaml.safe_dump(to_dict(config), sort_keys=False))
            rows = [row for row in self.metrics() if row["step"] <= step]
            self._write(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))
            self._board = TensorBoard(self.path / "tensorboard", step=step)

    def _write(self, path: Path, text: str) -> None:
        write_whole({path: text.encode()}, lambda _: _explained(self.path))

    @first_only
    def log(self, row: Row) -> None:
        """Appends the metrics of one step."""
        with _explained(self.path):
            with self._metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if self._board is not None:
                self._board.add(row)

    def metrics(self) -> list[Row]:
        """Every row logged so far, except lines that a kill or a crash cut short."""
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def _explained(path: Path) -> AbstractContextManager[None]:
    return explained(f"train.run_dir={path}", "use a directory that can be written")
