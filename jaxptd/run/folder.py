"""The run directory: the resolved config, and one line of metrics for each logged step."""

import contextlib
import errno
import importlib.util
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jaxptd.atomic_files import explained, write_whole
from jaxptd.config import Config, to_dict
from jaxptd.config.command_line import load_config
from jaxptd.distributed import coordination as processes
from jaxptd.errors import UserError

Row = dict[str, Any]

# What a resumed run may change: it changes where and how fast the numbers come, not the numbers.
# But for steps (the decay's end) and skip_above: a run whose gradients exploded goes on with it.
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
    """The first field in which two configs are different runs, in words; None if there is none."""
    old = to_dict(saved)
    for section, fields in to_dict(config).items():
        for name, value in fields.items():
            key = f"{section}.{name}"
            if section not in _FREE_SECTIONS and key not in _FREE and value != old[section][name]:
                return f"{key} is {value}, was {old[section][name]}"
    return None


def check_alike(config: Config, facts: dict[str, Any]) -> None:
    """Raises UserError, in all processes of a run, unless they are about to do the same.

    Args:
        config: of this process.
        facts: what else must be the same, by names for a person.
    """
    fields = {
        f"{s}.{name}": x for s, section in to_dict(config).items() for name, x in section.items()
    }
    del fields["data.source"]  # each host may have its own copy
    remedy = "give all processes the same config, data and train.run_dir"
    processes.check_alike("alike", fields | facts, remedy=remedy)


class RunDir:
    """Where a run writes: `config.yaml`, `metrics.jsonl`, `checkpoints/`; nothing until `open`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._config, self._metrics = self.path / "config.yaml", self.path / "metrics.jsonl"

    def check(self, config: Config) -> None:
        """Raises UserError if this directory holds another run, or one not to be resumed."""
        with _explained(self.path):
            there = next(each for each in (self.path, *self.path.parents) if each.exists())
            if not there.is_dir():
                raise UserError(f"train.run_dir={self.path}: {there} is a file; name a directory")
            if not os.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            known, used = self._config.exists(), self.checkpoints.exists()
        if config.checkpoint.resume == "never" and (known or used):
            raise UserError(
                f"train.run_dir={self.path} holds a run and checkpoint.resume is never; "
                "use another directory, or checkpoint.resume=auto"
            )
        changed = difference(config, load_config(self._config)) if known else None
        if changed:
            raise UserError(
                f"train.run_dir={self.path} holds another run: {changed}; "
                "use another directory, or that run's config"
            )

    def open(self, config: Config, *, step: int) -> None:
        """Makes the directory, writes the config, and drops metrics of steps after `step`."""
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(self._config, yaml.safe_dump(to_dict(config), sort_keys=False))
            rows = [row for row in self.metrics() if row["step"] <= step]
            self._write(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def _write(self, path: Path, text: str) -> None:
        write_whole({path: text.encode()}, lambda _: _explained(self.path))

    def log(self, row: Row) -> None:
        """Appends one step's metrics."""
        with _explained(self.path), self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> list[Row]:
        """Every step logged so far; a line cut short by a kill or a crash is left out."""
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]

    def tensorboard(self, *, step: int) -> Callable[[Row], None]:
        """What writes rows for TensorBoard too, in `tensorboard/`; nothing without tensorboardX.

        Args:
            step: TensorBoard hides what it has of later steps.
        """
        if importlib.util.find_spec("tensorboardX") is None:
            return lambda row: None
        folder = self.path / "tensorboard"
        with _explained(self.path):
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{socket.gethostname()}"
            _start_events(folder / name, step)
        return partial(self._add_events, folder / name)

    def _add_events(self, file: Path, row: Row) -> None:
        with _explained(self.path):
            _add_events(file, row)


class ReadOnlyRunDir(RunDir):
    """The run directory for a process that is not the first: it reads there and writes nothing."""

    def check(self, config: Config) -> None: ...

    def open(self, config: Config, *, step: int) -> None: ...

    def log(self, row: Row) -> None: ...

    def tensorboard(self, *, step: int) -> Callable[[Row], None]:
        return lambda row: None


# TensorBoard's events. tensorboardX's own SummaryWriter hands them to a thread, which ends when the
# disk is full, and the run then waits for it for ever; here the run is told.


def _start_events(file: Path, step: int) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog

    start = SessionLog(status=SessionLog.START)
    _append(file, [{"file_version": "brain.Event:2"}, {"step": step + 1, "session_log": start}])


def _add_events(file: Path, row: Row) -> None:
    from tensorboardX.summary import scalar

    values = [(name, value) for name, value in row.items() if name != "step" and value is not None]
    _append(file, [{"step": row["step"], "summary": scalar(*value)} for value in values])


def _append(file: Path, events: list[dict[str, Any]]) -> None:
    """Each event as a record: length, its CRC, the event, its CRC."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with file.open("ab") as out:
        for event in events:
            data = Event(wall_time=time.time(), **event).SerializeToString()
            length = struct.pack("<Q", len(data))
            crcs = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
            out.write(length + crcs[0] + data + crcs[1])


def _explained(path: Path) -> AbstractContextManager[None]:
    return explained(f"train.run_dir={path}", "use a directory that can be written")
