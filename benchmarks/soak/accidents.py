"""Accidents of a run: it is killed at some moment, alone or as one of two processes, and worse.

A *leg* is what runs between two starts of the command. Each leg has its own layout.
"""

import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

PATIENCE = 240.0  # seconds to wait for a leg that should end by itself
COMMAND = (sys.executable, "-m", "jaxptd.train")


class Leg:
    """Processes of one start of the command.

    Args:
        options: options of the command.
        folder: where their output goes.
        processes: how many there are.
        room: bytes that a file may have, as on a full disk; None means no limit.
    """

    def __init__(
        self, options: Sequence[str], folder: Path, *, processes: int = 1, room: int | None = None
    ) -> None:
        self.folder = folder
        shared: Mapping[str, str] = {}
        if processes > 1:
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            shared |= {"WORLD_SIZE": str(processes)}
        self.processes = [self._start(options, shared, rank, room) for rank in range(processes)]

    def _start(
        self, options: Sequence[str], shared: Mapping[str, str], rank: int, room: int | None
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **shared} | ({"RANK": str(rank)} if shared else {})
        with (self.folder / f"{rank}.out").open("wb") as out:
            return subprocess.Popen(
                [*COMMAND, *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=partial(_limit, room) if room else None,
            )

    @property
    def running(self) -> bool:
        """True while any of them runs."""
        return any(each.poll() is None for each in self.processes)

    def kill(self, rank: int) -> None:
        """Kills one of the processes; the others must end by themselves."""
        self.processes[rank].send_signal(signal.SIGKILL)

    def end(self) -> list[int]:
        """Returns the exit codes when all have ended. Kills those that do not end in time."""
        deadline = time.monotonic() + PATIENCE
        for each in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(max(deadline - time.monotonic(), 0.1))
            if each.poll() is None:
                each.kill()
                each.wait()
                raise AssertionError(f"a process did not end in {PATIENCE:.0f} s: {self.said()}")
        return [each.returncode for each in self.processes]

    def said(self) -> str:
        """The output of all processes."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))


def _limit(room: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def wait_a_while(leg: Leg, checkpoints: Path, draw: random.Random, longest: float) -> None:
    """Waits for a random time up to this many seconds."""
    _wait(leg, draw.uniform(0, longest), lambda: False)


def wait_for_a_save(leg: Leg, checkpoints: Path, draw: random.Random, longest: float) -> None:
    """Waits until files of a save appear some time after the start, and then a moment longer."""
    wait_a_while(leg, checkpoints, draw, longest)
    _wait(leg, longest, lambda: _saves(checkpoints))
    time.sleep(draw.uniform(0, 0.02))


def _saves(checkpoints: Path) -> bool:
    """True while the folder of a save has not been moved into place."""
    return any(path.name.startswith(".") for path in _folders(checkpoints))


def _wait(leg: Leg, seconds: float, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and leg.running and not until():
        time.sleep(0.001)


def saved(checkpoints: Path) -> list[int]:
    """The steps whose checkpoints are in place."""
    return sorted(int(path.name) for path in _folders(checkpoints) if path.name.isdigit())


def _folders(checkpoints: Path) -> list[Path]:
    return [*checkpoints.iterdir()] if checkpoints.exists() else []


def damage(folder: Path, draw: random.Random) -> None:
    """Damages a checkpoint: flips a bit of a file, cuts off its end, or deletes it."""
    path = draw.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    data = bytearray(path.read_bytes())
    kind = draw.choice(("bit", "end", "gone"))
    if kind == "gone" or not data:
        path.unlink()
    elif kind == "end":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[draw.randrange(len(data))] ^= 1
        path.write_bytes(data)
