"""Where else the rows of metrics.jsonl go: TensorBoard, CSV, Weights & Biases, MLflow."""

import contextlib
import csv
import dataclasses
import errno
import importlib.util
import io
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxptd.atomic_files import append_whole, write_whole
from jaxptd.config import Config, flat, to_dict
from jaxptd.config.training import LoggerName
from jaxptd.config.written import as_yaml
from jaxptd.errors import UserError, install
from jaxptd.run.metrics import Row

# ---- the interface -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """The run that a logger is opened for.

    Args:
        path: the run directory.
        config: of the run.
        step: the run continues after this step.
        rows: of the steps so far.
    """

    path: Path
    config: Config
    step: int = 0
    rows: Sequence[Row] = ()


class Logger(Protocol):
    """Takes the rows of a run, in the run's first process."""

    @property
    def where(self) -> Path | str:
        """Where the rows go, for messages."""

    def log(self, row: Row) -> None:
        """Takes the row of a step. Raises OSError if it cannot."""

    def close(self) -> None:
        """Ends the log, after the last row. Raises OSError if it cannot."""


class Loggers:
    """Passes each row to all loggers; warns once about one that fails, and the run continues.

    Args:
        loggers: take the rows in this order.
        say: prints a line.
    """

    def __init__(self, loggers: Sequence[Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = tuple(loggers), say
        self._reported = set[Path | str]()

    def log(self, row: Row) -> None:
        for logger in self._loggers:
            self._try(logger.where, partial(logger.log, row))

    def close(self) -> None:
        for logger in self._loggers:
            self._try(logger.where, logger.close)

    def _try(self, where: Path | str, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if where not in self._reported:
                self._reported.add(where)
                self._say(f"warning: cannot write {where}: {error.strerror}; the run continues")


# ---- CSV -----------------------------------------------------------------------------------------


class CommaSeparated:
    """Writes `metrics.csv`: a line per row, and a column for every number that any row has had.

    A row with a new number, such as the first evaluation's, rewrites the file.

    Args:
        start: the file begins with its rows.
    """

    def __init__(self, start: Start) -> None:
        self.where = start.path / "metrics.csv"
        self._columns: list[str] = []
        self._waiting: list[Row] = []
        self._rewrite(["step"], start.rows)

    def log(self, row: Row) -> None:
        """Appends a row, after those that an earlier call could not write."""
        self._waiting.append(row)
        if any(name not in self._columns for name in _names(self._waiting)):
            with self.where.open(newline="", encoding="utf-8") as file:
                written = list(csv.DictReader(file))
            self._rewrite(self._columns, [*written, *self._waiting])
        else:
            append_whole(self.where, _lines(self._columns, self._waiting).encode())
        self._waiting.clear()

    def close(self) -> None:
        """Does nothing: every row is in the file."""

    def _rewrite(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Rewrites the file with these columns and any others that the rows have."""
        wider = list(dict.fromkeys([*columns, *_names(rows)]))
        text = ",".join(wider) + "\n" + _lines(wider, rows)
        write_whole({self.where: text.encode()}, lambda _: nullcontext())
        self._columns = wider  # only now, because writing the file may fail


def _lines(columns: Sequence[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writerows(rows)  # None, or a number that a row lacks, becomes an empty cell
    return text.getvalue()


def _names(rows: Iterable[Row]) -> list[str]:
    return [name for row in rows for name in row]


# ---- services, which keep what earlier processes sent --------------------------------------------


class Sent:
    """Remembers a service's run and the last step sent to it, in the run directory.

    A killed run resumes from a checkpoint and logs again some steps that the service already has.
    The rows of these steps are not sent twice.

    Args:
        start: has the rows up to the checkpoint.
        service: name of the service.
    """

    def __init__(self, start: Start, service: str) -> None:
        self._path = start.path / f"{service}.json"
        self.id, self._last = _read(self._path)

    def open(self, run: str) -> None:
        """Records the service's name for the run, once known."""
        self.id = run
        self._write()

    def is_new(self, row: Row) -> bool:
        """True for a row that the service does not have yet; it counts as sent from then on."""
        if row["step"] <= self._last:
            return False
        self._last = row["step"]
        self._write()
        return True

    def _write(self) -> None:
        text = json.dumps({"run": self.id, "step": self._last}) + "\n"
        write_whole({self._path: text.encode()}, lambda _: contextlib.nullcontext())


def _read(path: Path) -> tuple[str | None, int]:
    """The name and the last step of a service's run; None and 0 if no file records them."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content["run"], str) and isinstance(content["step"], int):
            return content["run"], content["step"]
    return None, 0


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row, except its step and any that were not finite."""
    return {name: x for name, x in row.items() if name != "step" and x is not None}


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Turns a service package's errors into OSError, as `Logger.log` promises."""
    try:
        yield
    except OSError as error:
        raise OSError(errno.EIO, error.strerror or str(error)) from error
    except Exception as error:  # each package raises its own kinds
        raise OSError(errno.EIO, " ".join(str(error).split())[:300]) from error


# ---- TensorBoard ---------------------------------------------------------------------------------

# tensorboardX's own SummaryWriter passes events to a thread that dies when the disk is full; the
# run would then wait for it forever. Here the run gets the error.


class TensorBoard:
    """Appends rows of metrics to one events file, which begins with the config as text.

    TensorBoard hides events that an earlier process wrote for later steps.

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import text

        self.where = start.path / "tensorboard"
        self.where.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{socket.gethostname()}"
        self._file = self.where / name
        begin, step = SessionLog(status=SessionLog.START), start.step + 1
        code = "".join(f"    {line}\n" for line in as_yaml(start.config).splitlines())  # Markdown
        self._append(
            {"file_version": "brain.Event:2"},
            {"step": step, "session_log": begin},
            {"step": step, "summary": text("config", code)},
        )

    def log(self, row: Row) -> None:
        """Writes one event per number of a row."""
        from tensorboardX.summary import scalar

        events = [{"step": row["step"], "summary": scalar(*x)} for x in numbers(row).items()]
        self._append(*events)

    def close(self) -> None:
        """Does nothing: every event is in the file."""

    def _append(self, *events: dict[str, Any]) -> None:
        append_whole(self._file, b"".join(map(_record, events)))


def _record(event: dict[str, Any]) -> bytes:
    """An event in the file: length, CRC of the length, event, CRC of the event."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **event).SerializeToString()
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
    return length + crcs[0] + data + crcs[1]


# ---- Weights & Biases ----------------------------------------------------------------------------


class WeightsAndBiases:
    """Sends rows to a Weights & Biases run with the config and the run directory's name.

    A resumed run continues the same one. Project, entity, login and mode come from the package's
    own environment variables (`WANDB_PROJECT`, `WANDB_MODE=offline`, ...).

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        self._sent = Sent(start, "wandb")
        run = self._sent.id or uuid.uuid4().hex[:8]
        self.where = f"the Weights & Biases run {run}"
        self._run = wandb.init(
            id=run,
            resume="allow",
            reinit="finish_previous",  # a notebook may have its own run
            name=start.path.name,
            dir=str(start.path),
            config=to_dict(start.config),
            allow_val_change=True,  # a resumed run may change some fields
        )
        self._sent.open(run)

    def log(self, row: Row) -> None:
        with as_os_error():
            if self._sent.is_new(row):
                self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        with as_os_error():
            self._run.finish()


# ---- MLflow --------------------------------------------------------------------------------------


class MLflow:
    """Sends rows to an MLflow run with the config as parameters and as a file.

    A resumed run continues the same one and keeps its parameters, which MLflow does not let change.
    Server and experiment come from the package's own environment variables
    (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, ...).

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        import mlflow

        self._mlflow, self._sent = mlflow, Sent(start, "mlflow")
        new = self._sent.id is None
        run = mlflow.start_run(run_id=self._sent.id, run_name=start.path.name if new else None)
        self.where = f"the MLflow run {run.info.run_id}"
        self._sent.open(run.info.run_id)
        mlflow.log_text(as_yaml(start.config), "config.yaml")
        for section in dataclasses.fields(start.config) if new else ():
            # One call per section: servers take at most 100 parameters at once.
            mlflow.log_params(flat(getattr(start.config, section.name), f"{section.name}."))

    def log(self, row: Row) -> None:
        with as_os_error():
            if self._sent.is_new(row):
                self._mlflow.log_metrics(numbers(row), step=row["step"], synchronous=False)

    def close(self) -> None:
        with as_os_error():
            self._mlflow.flush_async_logging()
            self._mlflow.end_run()


# ---- loggers by name, as train.loggers chooses them ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of logger.

    Args:
        open: opens one.
        package: the package that it imports. None if it needs none.
        remedy: how to install the package.
    """

    open: Callable[[Start], Logger]
    package: str | None = None
    remedy: str = ""


LOGGERS: Mapping[LoggerName, Kind] = MappingProxyType(
    {
        "tensorboard": Kind(TensorBoard, "tensorboardX", install("tb")),
        "csv": Kind(CommaSeparated),
        "wandb": Kind(WeightsAndBiases, "wandb", "pip install wandb"),
        "mlflow": Kind(MLflow, "mlflow", "pip install mlflow"),
    }
)


def require_packages(config: Config) -> None:
    """Raises UserError if a logger that the config names lacks its package."""
    for name in config.train.loggers or ():
        kind = LOGGERS[name]
        if not _is_installed(kind):
            raise UserError(
                f"train.loggers names {name}, which needs the package {kind.package}; "
                f"{kind.remedy}, or leave {name} out"
            )


def open_loggers(start: Start, say: Callable[[str], None]) -> Iterator[Logger]:
    """Opens the loggers of a run; if none are named, TensorBoard if its package is installed.

    A logger that cannot be opened is left out with a warning.
    """
    named = start.config.train.loggers
    names: list[LoggerName] = ["tensorboard"] if named is None else named
    for name in names:
        try:
            if named is not None or _is_installed(LOGGERS[name]):
                yield LOGGERS[name].open(start)
        except Exception as error:  # no disk space, no login, or a broken package
            reason = " ".join(str(error).split())[:300]
            say(f"warning: this run logs nothing to {name}: {reason}")


def _is_installed(kind: Kind) -> bool:
    return kind.package is None or importlib.util.find_spec(kind.package) is not None
