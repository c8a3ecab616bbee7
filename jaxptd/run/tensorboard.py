"""Metrics as TensorBoard events.

tensorboardX's own SummaryWriter passes events to a thread that dies when the disk is full, and the
run then waits for that thread for ever. Here the run gets the error.
"""

import importlib.util
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from jaxptd.atomic_files import append_whole


class TensorBoard:
    """Appends rows of metrics to one events file; does nothing without tensorboardX.

    Args:
        folder: of the events files; it is made if it does not exist.
        step: TensorBoard hides events of later steps that an earlier process wrote.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self.folder = folder
        self._file: Path | None = None
        if importlib.util.find_spec("tensorboardX") is None:
            return
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{socket.gethostname()}"
        self._file = folder / name
        start = SessionLog(status=SessionLog.START)
        self._append({"file_version": "brain.Event:2"}, {"step": step + 1, "session_log": start})

    def add(self, row: dict[str, Any]) -> None:
        """Writes one event for each number of a row, except `step` and those that are None.

        Raises:
            OSError: the file cannot be written; it has no event of this row.
        """
        if self._file is None:
            return
        from tensorboardX.summary import scalar

        numbers = {name: x for name, x in row.items() if name != "step" and x is not None}
        events = [{"step": row["step"], "summary": scalar(*each)} for each in numbers.items()]
        self._append(*events)

    def _append(self, *events: dict[str, Any]) -> None:
        assert self._file is not None
        append_whole(self._file, b"".join(map(_record, events)))


def _record(event: dict[str, Any]) -> bytes:
    """An event in the file: length, CRC of the length, event, CRC of the event."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **event).SerializeToString()
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
    return length + crcs[0] + data + crcs[1]
