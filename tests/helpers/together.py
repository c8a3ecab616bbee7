"""Starts several processes of one run on this machine.

Each process runs the code of a test: a patched trainer, or a separate loop.
"""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import jax
from jaxptd.checkpoint import Checkpoints
from jaxptd.errors import run_command
from jaxptd.train import Training, main

RANK = int(os.environ["RANK"])
{patches}
if __name__ == "__main__":
    run_command(main)
"""

PATIENCE = 300.0  # seconds, after which a hanging test ends


@dataclasses.dataclass(frozen=True)
class Ended:
    """The outcome of a process: exit code (minus the signal) and output."""

    code: int | None
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines of its output, except gloo's."""
        return [
            line
            for line in self.out.splitlines()
            if not re.search(r"\[Gloo\]|is connected to \d+ peer ranks", line)
        ]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Together:
    """Starts processes, in order of rank; they find each other through torchrun's variables.

    Args:
        code: code that every process runs.
        argv: arguments of every process.
        folder: folder for their output.
        count: number of processes.
    """

    def __init__(self, code: str, argv: list[str], folder: Path, *, count: int = 2) -> None:
        self.folder, self.count = folder, count
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"WORLD_SIZE": str(count), "PYTHONPATH": str(ROOT)}
        self.processes = []
        for rank in range(count):
            environment = {**os.environ, **shared, "RANK": str(rank)}
            with self._file(rank, "out").open("w") as out, self._file(rank, "err").open("w") as err:
                command = [sys.executable, "-c", code, *argv]
                self.processes.append(
                    subprocess.Popen(command, stdout=out, stderr=err, env=environment)
                )

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"{rank}.{kind}"

    def wait_for(self, text: str, *, rank: int = 0) -> None:
        """Waits until a process has printed this text."""
        end = time.monotonic() + PATIENCE
        while text not in self._file(rank, "out").read_text():
            assert time.monotonic() < end, self._file(rank, "err").read_text()
            assert self.processes[rank].poll() is None, self._file(rank, "err").read_text()
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def ended(self, *, without: int | None = None) -> list[Ended | None]:
        """Waits until all but `without` have ended, and kills those that time out."""
        found: list[Ended | None] = [None] * self.count
        end = time.monotonic() + PATIENCE
        while any(x is None for rank, x in enumerate(found) if rank != without):
            for rank, process in enumerate(self.processes):
                if found[rank] is None and process.poll() is not None:
                    found[rank] = self._ended(rank, process.returncode)
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        self.kill()
        return [x or self._ended(rank, None) for rank, x in enumerate(found)]

    def _ended(self, rank: int, code: int | None) -> Ended:
        texts = [self._file(rank, kind).read_text() for kind in ("out", "err")]
        return Ended(code, *texts)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def trainer(patches: str = "") -> str:
    """Code of the training command with a test's changes."""
    return TRAIN.format(patches=textwrap.dedent(patches))
