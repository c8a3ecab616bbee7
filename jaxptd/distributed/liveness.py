"""Ends the run on every process when one dies or hangs, even if the main thread is blocked.

A collective waits forever for a process that is dead or stuck. So in each process one thread sends
the phase of the main thread (`Watchdog.beat`) to the others through the coordination service, and
another measures how long each process has been silent or in the same phase. The process that finds
a dead or stuck one tells all others, and all end with one line that names it, and the same exit
code.

The coordination service runs in process 0: if it does not answer, process 0 is the silent one. If
process 0 is killed, JAX aborts the others at once; see `on_abort`.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World
from jaxptd.distributed.watchdog import Beat, Phase, Watchdog, long_phases, on_abort, stuck
from jaxptd.errors import BAD_INPUT, BUG, INTERRUPTED, LOST, UserError, print_error

RESUME = "restart the run to resume from the last checkpoint (checkpoint.resume=auto, the default)"
BEATS = 20  # beats in the time after which a process counts as silent
FAREWELL = 1.0  # seconds an ending process waits so that the others can read why
HOUR = 3600.0
_COMPLETED = ["", 0]  # the message and exit code of a run whose processes all reached the end
# How XLA's errors (of several types) begin when a partner in a collective has gone.
_PARTNER_ERROR = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): ")


class Liveness:
    """The watching threads of one process; they run inside `watching()`.

    Args:
        world: the processes.
        watchdog: of the main thread.
        report: prints a line about a phase that takes long but is not a hang.
        before_exit: called when `end` ends this process, which skips other cleanup.
    """

    def __init__(
        self,
        world: World,
        watchdog: Watchdog,
        *,
        report: Callable[[str], None],
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._watchdog, self._report = world, watchdog, report
        self._before_exit = before_exit
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._beats: dict[int, Beat] = {}
        self._messages: dict[int, str] = {}
        self._heard = dict.fromkeys(range(world.count), 0.0)  # by the watchdog's clock
        self._reported: dict[int, int] = {}

    @property
    def _interval(self) -> float:
        """Seconds between two beats."""
        return min(max((self._watchdog.stuck_after or HOUR) / BEATS, 0.05), 2.0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a failure in one process ends all processes."""
        targets = [self._watch] if self._world.alone else [self._watch, self._beat, self._listen]
        threads = [threading.Thread(target=each, daemon=True) for each in targets]
        for thread in threads:
            thread.start()
        try:
            with contextlib.nullcontext() if self._world.alone else self._failures():
                yield
        finally:
            self._over.set()
            for thread in threads:  # Python would abort if it ended one inside a JAX call
                thread.join()
        if not self._world.alone:
            jax.distributed.shutdown()

    # ---- the end of the run ------------------------------------------------------------------

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Inside, an exception of the main thread ends all processes at once."""
        remove = on_abort(self._coordinator_lost)
        try:
            yield
            coordination.barrier("end", seconds=coordination.DAY)
            coordination.put_first("end", json.dumps(_COMPLETED))
        except UserError as error:
            self.end(f"{self._world.name}: {error}", BAD_INPUT)
        except KeyboardInterrupt:
            self.interrupted(INTERRUPTED)
        except BaseException as error:
            if _PARTNER_ERROR.match(str(error)):
                self._wait_for_verdict()
            traceback.print_exc()
            self.end(f"{self._world.name}: {_line(error)}", BUG)
        finally:
            remove()

    def _wait_for_verdict(self) -> None:
        """Sleeps until the threads have had time to find which process has gone."""
        with self._watchdog.phase(Phase.ENDING):
            time.sleep(self._watchdog.stuck_after + 4 * self._interval + FAREWELL)

    def end(self, line: str, code: int) -> NoReturn:
        """Ends all processes of the run with this line and exit code; the first call decides."""
        if not self._ending.acquire(blocking=False):
            time.sleep(HOUR)  # another thread is already ending the process
        if not self._world.alone:
            line, code = json.loads(self._agree_on_end(json.dumps([line, code])))
        print_error(line)
        if coordination.is_first() and not self._world.alone:
            time.sleep(FAREWELL)  # the service ends with this process
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self._before_exit()
        os._exit(code)

    def interrupted(self, code: int) -> NoReturn:
        """Ends this process and the others at once, as a signal asked."""
        name = "the run" if self._world.alone else self._world.name
        self.end(f"{name} was interrupted", code)

    def _agree_on_end(self, message: str) -> str:
        """Sends a message to all; returns the first one sent, or this one without an answer."""
        answers = [message]

        def send() -> None:
            answers.append(coordination.put_first("end", message))

        thread = threading.Thread(target=send, daemon=True)  # the service may not answer
        thread.start()
        thread.join(FAREWELL)
        return answers[-1]

    def _coordinator_lost(self) -> None:
        """Called when the process aborts: names process 0 if it has gone, and exits."""
        host, _, port = str(self._world.coordinator).rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return  # process 0 is alive, so this abort has another cause
        here = self._watchdog.beat()
        print_error(
            f"{self._world.name_of(0)} is gone and with it the coordination service "
            f"(here: {here}); {RESUME}"
        )
        os._exit(LOST)

    # ---- threads ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Ticks the watchdog's clock, and ends the run when a process is dead or stuck.

        Time in which this whole process was suspended does not count.
        """
        interval, last = self._interval, time.monotonic()
        while not self._over.wait(interval):
            now = time.monotonic()
            self._watchdog.tick(min(now - last, 2 * interval))
            last = now
            if line := self._verdict():
                self.end(line, LOST)
            self._report_long()

    def _beat(self) -> None:
        """Sends the phase of the main thread to the other processes, and reads theirs."""
        count = 0
        while not self._over.wait(self._interval):
            count += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_watch` measures the silence
                message = f"{count} {self._watchdog.beat().to_json()}"
                coordination.put(f"beat/{self._world.id}", message)
                for rank, text in coordination.get_all("beat").items():
                    self._receive(int(rank), text)

    def _receive(self, rank: int, message: str) -> None:
        if self._messages.get(rank) == message:
            return
        self._messages[rank], self._heard[rank] = message, self._watchdog.now
        if rank != self._world.id:
            self._beats[rank] = Beat.from_json(message.partition(" ")[2])

    def _listen(self) -> None:
        """Ends this process as soon as another process has ended the run."""
        while not self._over.is_set():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                end = json.loads(coordination.wait_for_first("end", seconds=HOUR))
                if end == _COMPLETED:
                    return
                self.end(*end)
            self._over.wait(1.0)  # the service does not answer

    # ---- verdicts ---------------------------------------------------------------------------

    def _verdict(self) -> str | None:
        """Returns a line that names a dead or stuck process, else None."""
        limit, now = self._watchdog.stuck_after, self._watchdog.now
        if limit == 0:
            return None
        beats = {**self._beats, self._world.id: self._watchdog.beat()}
        if not self._world.alone:
            silent = [rank for rank, heard in self._heard.items() if now - heard > limit]
            if self._world.id in silent:  # its own beat is missing: no service
                silent = [0]
            if silent:
                return self._silent(silent[0], now - self._heard[silent[0]], beats.get(silent[0]))
        rank = stuck(beats) if len(beats) == self._world.count else None
        return None if rank is None else self._stuck(rank, beats[rank])

    def _silent(self, rank: int, seconds: float, beat: Beat | None) -> str:
        last = f"last heard {beat}" if beat else "never heard"
        return (
            f"{self._world.name_of(rank)} has been silent for {seconds:.0f} s, {last}: killed, "
            f"stopped or cut off; {RESUME}"
        )

    def _stuck(self, rank: int, beat: Beat) -> str:
        where = self._watchdog.where() if rank == self._world.id else ""
        who = "the run" if self._world.alone else self._world.name_of(rank)
        return (
            f"{who} is stuck: {beat.phase} for {beat.seconds:.0f} s at step {beat.step}{where}; "
            f"{RESUME}, and raise processes.stuck_after={self._watchdog.stuck_after:g} if it was "
            "slow"
        )

    def _report_long(self) -> None:
        """Reports a long phase that is not a hang, each time its duration has doubled."""
        if not coordination.is_first():
            return
        beats = {**self._beats, self._world.id: self._watchdog.beat()}
        times = long_phases(beats, self._watchdog.stuck_after)
        for rank, number in times.items():
            if number > self._reported.get(rank, 0):
                beat, name = beats[rank], "" if self._world.alone else self._world.name_of(rank)
                self._report(f"{name} still {beat}, for {beat.seconds:.0f} s so far".strip())
        self._reported = times


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
