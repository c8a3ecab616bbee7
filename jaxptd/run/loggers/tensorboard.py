"""Metrics as TensorBoard events.

tensorboardX's own SummaryWriter passes events to a thread that dies when the disk is full, and the
run then waits for that thread for ever. Here the run gets the error.
"""

import os
import socket
import struct
import time
from typing import Any

from jaxptd.atomic_files import append_whole
from jaxptd.config.written import as_yaml
from jaxptd.run.loggers.logger import Start
from jaxptd.run.loggers.service import numbers
from jaxptd.run.metrics import Row


class TensorBoard:
    """Appends rows of metrics to one events file, which begins with the config as a text.

    TensorBoard hides the events of later steps that an earlier process wrote.

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
        """Writes one event for each number of a row."""
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
