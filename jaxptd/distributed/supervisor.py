"""Starts the processes of a run on this host, and starts all again after one has died.

It runs nothing itself and imports no jax, so that nothing of it can hang in a collective. The
processes find each other through torchrun's variables (`launchers.find`). When one dies, the
others would only notice after `processes.stuck_after`; the supervisor knows at once, kills them
and starts all again.

It sleeps until a process ends, prints an error, or a signal arrives. It polls only the number of
processes that may run, for a run that may be started with fewer.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from jaxptd.distributed.launchers import PORTS, World
from jaxptd.errors import BAD_INPUT, INSISTING, SIGNALS, UserError

HOST = "127.0.0.1"
GRACE = 10.0  # seconds in which processes end by themselves after another one ended with an error
POLL_INTERVAL = 1.0  # seconds between looks at how many processes may run
RESIZE = signal.SIGUSR1  # asks for a stop, and a Ctrl-C after it is not yet the second request
CHUNK = 2**16  # bytes read at once of what a process prints
# What JAX prints when process 0 has gone: a line with the first, then many from the second on.
POLLED = "Polled an error from coordination service"
ABORTS = "JAX distributed service detected fatal errors"
STARTED_BY_ANOTHER = ("TORCHELASTIC_USE_AGENT_STORE",)  # variables of an outer launcher
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent has died


@dataclasses.dataclass(frozen=True)
class Death:
    """The first process of a run that did not end well.

    Args:
        rank: its number.
        code: its exit code, or minus the number of the signal that killed it.
    """

    rank: int
    code: int

    @property
    def exit_code(self) -> int:
        """The code as shells report it."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def words(self) -> str:
        if self.code > 0:
            return f"ended with exit code {self.code}"
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"


class Supervisor:
    """Runs a command in several processes until it is done.

    Args:
        command: of an attempt: its number, from 0, to the words of a command line.
        count: how many processes to start now; 0 to wait until it says more.
        restarts: how often all are started again after a death.
        say: prints a line.
        watched: stop the processes when `count` changes, and start as many as it says.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        count: Callable[[], int],
        restarts: int,
        say: Callable[[str], None],
        watched: bool = False,
    ) -> None:
        self._command, self._count, self._restarts, self._say = command, count, restarts, say
        self._watched = watched

    def run(self) -> int:
        """Returns the exit code of the run: 0, or that of the first process that died.

        Bad input (exit code 2) and a run that a signal has stopped are not started again.
        """
        deaths = 0
        with Signals() as signals:
            for number in itertools.count():
                if not (count := self._wait_for_processes(signals)):
                    return 128 + next(signals.take())
                attempt = self._attempt(number, count, signals)
                if (death := attempt.death) is None:
                    return 0
                if signals.taken or death.code == BAD_INPUT:
                    return death.exit_code
                if attempt.resized and death.exit_code == 128 + RESIZE:
                    continue
                deaths += 1
                left = f"restart {deaths} of {self._restarts}"
                if deaths > self._restarts:
                    left = f"no restart is left (--restarts {self._restarts})"
                self._say(f"{World(count).name_of(death.rank)} {death.words}; {left}")
                if deaths > self._restarts or signals.pending():  # which ends nothing else
                    return death.exit_code
        raise AssertionError("the last attempt returns")

    def _wait_for_processes(self, signals: "Signals") -> int:
        """Returns how many processes to start; 0 if a signal ends the wait for them."""
        waits = False
        while not (count := self._count()) and not signals.pending():
            if not waits:
                self._say("waits until enough processes are available")
            waits = True
            select.select([signals.reader], [], [], POLL_INTERVAL)
            signals.drain()
        return count

    def _attempt(self, number: int, count: int, signals: "Signals") -> "Attempt":
        with Attempt(self._command(number), count, signals) as attempt:
            while not attempt.over:
                for each in attempt.events(POLL_INTERVAL if self._watched else None):
                    self._say(f"{each.name} goes to all processes; {_next(each)}")
                if self._watched and not attempt.resized and (now := self._count()) != count:
                    then = "goes on" if now else "waits"
                    self._say(f"from {count} to {now} processes: the run saves and {then}")
                    attempt.resize()
            return attempt


def _next(number: signal.Signals) -> str:
    return "a second one ends them at once" if number in INSISTING else "they save and stop"


class Signals:
    """Inside, signals that ask to stop are collected; each wakes a `select` on `reader`."""

    def __init__(self) -> None:
        self.taken: list[signal.Signals] = []  # those that were passed on
        self._new: list[signal.Signals] = []
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        if self._before[signal.SIGHUP] == signal.SIG_IGN:  # under `nohup`
            del self._before[signal.SIGHUP]
        for number in self._before:
            signal.signal(number, lambda number, _: self._new.append(signal.Signals(number)))
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.reader)
        os.close(self._writer)

    def drain(self) -> None:
        """Lets the next `select` wait for another signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, CHUNK)

    def pending(self) -> bool:
        """True if a signal has arrived that nobody has taken."""
        return bool(self._new)

    def take(self) -> Iterator[signal.Signals]:
        """Yields each new signal."""
        while self._new:
            self.taken.append(self._new.pop(0))
            yield self.taken[-1]


class Attempt:
    """The processes of one attempt. On exit all have ended.

    Args:
        command: its words.
        count: number of processes.
        signals: passed on to all of them.
    """

    def __init__(self, command: Sequence[str], count: int, signals: Signals) -> None:
        self.death: Death | None = None
        self.resized = False
        self._signals = signals
        self._deadline: float | None = None  # when those left are killed
        self._said: set[str] = set()
        self._aborting: set[int] = set()  # processes that JAX ends because process 0 has gone
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.reader, selectors.EVENT_READ)
        shared = shared_variables(count)
        # As in `Liveness.end`, each process says an error of the run; it is shown once.
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, Any] = {}
        self._errors: dict[int, bytes] = dict.fromkeys(range(count), b"")
        try:
            for rank in range(count):
                self._start(rank, command, {**shared, **variables(rank)})
        except BaseException:
            self.__exit__()
            raise

    def _start(self, rank: int, command: Sequence[str], given: Mapping[str, str]) -> None:
        process = _start(command, given, shown=rank == 0)
        self._running[rank], self._streams[rank] = process, process.stderr
        os.set_blocking(self._streams[rank].fileno(), False)
        self._selector.register(self._streams[rank], selectors.EVENT_READ, rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        for rank, stream in self._streams.items():
            self._read(rank, stream, last=True)
            stream.close()
        self._selector.close()

    @property
    def over(self) -> bool:
        """True once all processes have ended."""
        return not self._running

    def resize(self) -> None:
        """Asks all processes to save and stop, so that the run can go on with more or fewer."""
        self.resized = True
        for process in self._running.values():
            process.send_signal(RESIZE)

    def events(self, seconds: float | None = None) -> Iterator[signal.Signals]:
        """Waits for something to happen; yields each signal that was passed on.

        Args:
            seconds: longest wait. None for no limit.
        """
        waits = [] if seconds is None else [seconds]
        if self._deadline is not None:
            waits.append(max(0.0, self._deadline - time.monotonic()))
        for key, _ in self._selector.select(min(waits, default=None)):
            if key.data is None:
                self._signals.drain()
            elif not self._read(key.data, key.fileobj):
                self._selector.unregister(key.fileobj)
        for number in self._signals.take():
            for process in self._running.values():
                process.send_signal(number)
            if sum(each in INSISTING for each in self._signals.taken) > 1:
                self._kill_after(GRACE)
            yield number
        self._collect()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for process in self._running.values():
                process.kill()

    def _collect(self) -> None:
        """Notes which processes have ended, and ends the others if one did not end well."""
        ended = {rank: p.returncode for rank, p in self._running.items() if p.poll() is not None}
        for rank in ended:
            del self._running[rank]
        asked = {128 + number for number in self._signals.taken}
        asked |= {128 + RESIZE} if self.resized else set()
        stopping = bool(asked)
        # A process that a signal killed comes first: it took those along that end with a code.
        for rank in sorted(ended, key=lambda rank: (ended[rank] > 0, rank)):
            if (code := ended[rank]) == 0:
                continue
            self.death = self.death or Death(rank, code)
            if code not in asked:  # else all of them stop
                self._kill_after(GRACE if code > 0 or stopping else 0.0)

    def _kill_after(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._deadline = end if self._deadline is None else min(self._deadline, end)

    # ---- what they print ------------------------------------------------------------------------

    def _read(self, rank: int, stream: Any, *, last: bool = False) -> bool:
        """Passes on what a process has printed as errors, line by line; False at its end."""
        data: bytes | None = b"."
        while data:
            data = stream.read(CHUNK)  # None if there is nothing now
            self._errors[rank] += data or b""
        *lines, rest = self._errors[rank].split(b"\n")
        self._errors[rank] = b"" if last else rest
        for line in [*lines, rest] if last and rest else lines:
            self._pass_on(rank, line.decode(errors="replace"))
        return data is None

    def _pass_on(self, rank: int, line: str) -> None:
        """Prints a line with the process's number, but an error only once, and JAX's in short."""
        if line.startswith("error: "):
            if line in self._said:
                return
            self._said.add(line)
        elif rank in self._aborting or POLLED in line:
            return
        elif ABORTS in line:
            self._aborting.add(rank)
            cause = line.partition("absl::Status: ")[2].partition(". ")[0] or line
            line = f"process {rank}: JAX ended it: {cause}"
        elif rank:
            line = f"process {rank}: {line}"
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def shared_variables(count: int) -> dict[str, str]:
    """The variables by which processes find each other, with a port that is free now."""
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }


def variables(rank: int) -> dict[str, str]:
    """The variables of one process, all of them on one host."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def free_port() -> int:
    """A port that nothing uses, outside of those that the system gives to connections.

    Raises:
        UserError: there is none.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind((HOST, port))
            return port
    raise UserError(f"every port from {PORTS.start} to {PORTS.stop - 1} of this host is in use")


@functools.cache
def _stop_with_parent() -> Callable[[], object] | None:
    """Makes what a new process calls to get SIGTERM when the supervisor dies; None elsewhere."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _start(
    command: Sequence[str], given: Mapping[str, str], *, shown: bool
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own: Ctrl-C reaches it only through the supervisor."""
    others = {k: v for k, v in os.environ.items() if k not in STARTED_BY_ANOTHER}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**others, **given},
        start_new_session=True,
        preexec_fn=_stop_with_parent(),
    )
