"""Ends a run whose processes cannot go on together, also where the main thread hangs.

A collective waits for ever for a process that is dead or stuck. So in each process one thread tells
the others, through the coordination service, what the main thread is in (`Watchdog.beat`), and one
counts how long each of them has been silent, or in the same thing. Who finds that the run cannot go
on says so to all, and all end with one line that names the process, and the same exit code.

The coordination service is process 0's: without an answer from it, process 0 is the silent one. If
it is killed, JAX aborts the others at once; see `on_abort`.
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

from jaxptd.distributed import coordination as processes
from jaxptd.distributed.abort_hook import on_abort
from jaxptd.distributed.launchers import World
from jaxptd.distributed.watchdog import Beat, Phase, Watchdog, long_phases, stuck
from jaxptd.errors import BAD_INPUT, BUG, INTERRUPTED, LOST, UserError, print_error

RESUME = "go on from the last checkpoint with checkpoint.resume=auto, the default"
BEATS = 20  # in the time after which a process counts as silent
FAREWELL = 1.0  # seconds that a process that ends gives the others to hear of it
HOUR = 3600.0
_WELL = ["", 0]  # how a run ends that has come to its end
# How XLA's errors begin that a collective raises when a partner has gone, of whatever type.
_OF_PARTNERS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED): ")


class Liveness:
    """The threads of one process; they run while `watching()`.

    Args:
        world: which processes.
        watchdog: of the main thread.
        report: prints a line for a person, about what takes long and is no hang.
    """

    def __init__(self, world: World, watchdog: Watchdog, *, report: Callable[[str], None]) -> None:
        self._world, self._watchdog, self._report = world, watchdog, report
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._beats: dict[int, Beat] = {}
        self._said: dict[int, str] = {}
        self._heard = dict.fromkeys(range(world.count), 0.0)  # by the watchdog's clock
        self._reported: dict[int, int] = {}

    @property
    def _interval(self) -> float:
        """Seconds between two signs of life."""
        return min(max((self._watchdog.stuck_after or HOUR) / BEATS, 0.05), 2.0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside it, what goes wrong in one process ends all."""
        targets = [self._watch] if self._world.alone else [self._watch, self._talk, self._listen]
        threads = [threading.Thread(target=each, daemon=True) for each in targets]
        for thread in threads:
            thread.start()
        try:
            with contextlib.nullcontext() if self._world.alone else self._failures():
                yield
        finally:
            self._over.set()
            for thread in threads:  # one that Python ends within a call of JAX's aborts the process
                thread.join()
        if not self._world.alone:
            jax.distributed.shutdown()

    # ---- what ends the run ------------------------------------------------------------------

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What the main thread raises ends all processes, without waiting for any of them."""
        hold = on_abort(self._coordinator_lost)
        try:
            yield
            processes.barrier("end", seconds=processes.DAY)
            processes.put_first("end", json.dumps(_WELL))
        except UserError as error:
            self.end(f"{self._world.name}: {error}", BAD_INPUT)
        except KeyboardInterrupt:
            self.end(f"{self._world.name} was interrupted", INTERRUPTED)
        except BaseException as error:
            if _OF_PARTNERS.match(str(error)):
                self._wait_for_verdict()
            traceback.print_exc()
            self.end(f"{self._world.name}: {_line(error)}", BUG)
        finally:
            hold()

    def _wait_for_verdict(self) -> None:
        """Gives the threads the time that they need to name a process that has gone."""
        with self._watchdog.phase(Phase.ENDING):
            time.sleep(self._watchdog.stuck_after + 4 * self._interval + FAREWELL)

    def end(self, line: str, code: int) -> NoReturn:
        """Ends all processes of the run with this line and exit code; the first one counts."""
        if not self._ending.acquire(blocking=False):
            time.sleep(HOUR)  # another thread does it already
        said = json.dumps([line, code])
        if not self._world.alone:
            said = self._tell_all(said)
        line, code = json.loads(said)
        print_error(line)
        if self._world.first and not self._world.alone:
            time.sleep(FAREWELL)  # the service goes with this process
        sys.stdout.flush()
        os._exit(code)

    def _tell_all(self, said: str) -> str:
        """What all processes hear; the coordination service may be the one that does not answer."""
        heard = [said]

        def settle() -> None:
            heard.append(processes.put_first("end", said))

        thread = threading.Thread(target=settle, daemon=True)
        thread.start()
        thread.join(FAREWELL)
        return heard[-1]

    def _coordinator_lost(self) -> None:
        """Called when the process aborts: if process 0 is gone, with a line of ours."""
        host, _, port = str(self._world.coordinator).rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return  # it is there: this is an abort of another kind
        here = self._watchdog.beat()
        print_error(
            f"{self._world.name_of(0)} is gone, and with it the coordination service "
            f"(here: {here}); {RESUME}"
        )
        os._exit(LOST)

    # ---- threads ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Counts time; not that in which this process itself stood still."""
        interval, last = self._interval, time.monotonic()
        while not self._over.wait(interval):
            now = time.monotonic()
            self._watchdog.tick(min(now - last, 2 * interval))
            last = now
            if line := self._verdict():
                self.end(line, LOST)
            self._report_long()

    def _talk(self) -> None:
        """Tells the others what the main thread is in, and hears it of them."""
        count = 0
        while not self._over.wait(self._interval):
            count += 1
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # silence is counted
                processes.put(
                    f"beat/{self._world.id}", f"{count} {self._watchdog.beat().to_json()}"
                )
                for rank, text in processes.get_all("beat").items():
                    self._hear(int(rank), text)

    def _hear(self, rank: int, text: str) -> None:
        if self._said.get(rank) == text:
            return
        self._said[rank], self._heard[rank] = text, self._watchdog.now
        if rank != self._world.id:
            self._beats[rank] = Beat.from_json(text.partition(" ")[2])

    def _listen(self) -> None:
        """Ends this process as soon as another one says that all end."""
        while not self._over.is_set():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                found = json.loads(processes.wait_for("end", seconds=HOUR))
                if found == _WELL:
                    return
                self.end(*found)
            self._over.wait(1.0)  # the service does not answer

    # ---- verdicts ---------------------------------------------------------------------------

    def _verdict(self) -> str | None:
        """Why the run cannot go on, in a line; None while it can."""
        limit, now = self._watchdog.stuck_after, self._watchdog.now
        if limit == 0:
            return None
        beats = {**self._beats, self._world.id: self._watchdog.beat()}
        if not self._world.alone:
            silent = [rank for rank, heard in self._heard.items() if now - heard > limit]
            if self._world.id in silent:  # not even of oneself: the service does not answer
                silent = [0]
            if silent:
                return self._silent(silent[0], now - self._heard[silent[0]], beats.get(silent[0]))
        held_up = stuck(beats) if len(beats) == self._world.count else None
        return None if held_up is None else self._stuck(held_up, beats[held_up])

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
            f"{RESUME}, processes.stuck_after={self._watchdog.stuck_after:g} can be longer"
        )

    def _report_long(self) -> None:
        """Says, each time it has doubled, what takes long and is no hang."""
        if not self._world.first:
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
