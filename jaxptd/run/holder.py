"""The process that holds a run directory."""

import contextlib
import dataclasses
import datetime
import json
import os
import socket
from pathlib import Path
from typing import Self

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ENDED = frozenset("ZX")  # states of a process that nobody has waited for yet


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process.

    Args:
        host: name of its host.
        boot: identifies the host's boot. Empty if the system does not say.
        pid: its number, which the system may later reuse.
        started: clock ticks from boot to its start. None if the system does not say.
        since: when it took the lock, UTC.
    """

    host: str
    boot: str
    pid: int
    started: int | None
    since: str

    @classmethod
    def this_process(cls) -> Self:
        now = datetime.datetime.now(datetime.UTC)
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), pid, _start_of(pid), f"{now:%Y-%m-%d %H:%M:%S}")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        try:
            holder = cls(**json.loads(text))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a holder: {error}") from error
        words = (holder.host, holder.boot, holder.since)
        if not all(isinstance(word, str) and word.isprintable() for word in words):
            raise ValueError("host, boot and since are text")
        if type(holder.pid) is not int or not 0 < holder.pid < 2**31:
            raise ValueError("pid is the number of a process")
        if holder.started is not None and type(holder.started) is not int:
            raise ValueError("started is a number")
        return holder

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    def is_of_this_host(self) -> bool:
        return self.host == socket.gethostname()

    def is_running(self) -> bool:
        """True if this host runs the process; False if another process has its number by now."""
        if self.boot != _boot():
            return False
        if self.started is not None:
            return _start_of(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it belongs to another user
            return True
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since} UTC"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _start_of(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _ENDED else int(fields[19])
