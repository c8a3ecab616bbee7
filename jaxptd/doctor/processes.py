"""Checks of the processes of a run: what launched them, and what differs between them."""

import collections
import contextlib
import dataclasses
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxptd.config import ProcessesConfig
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World
from jaxptd.doctor.meeting import meet, met_row, resolved
from jaxptd.doctor.page import Row, Verdict, judged, note, problem

Environ = Mapping[str, str]
# Variables of launchers that are named on a page, without their values.
LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    *("SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX"),
)
MOST = 64  # processes with a row each; of more, only those with a finding
PINGS = 5
LATE, WRONG = 1.0, 10.0  # seconds that a clock differs: a note, a problem
PATIENCE = 120.0  # seconds for an answer of another process


# ---- before they join ----------------------------------------------------------------------------


def launch(world: World, config: ProcessesConfig, environ: Environ) -> list[Row]:
    """Rows on what says that there are several processes, and on the names of hosts."""
    names = [name for name in LAUNCHERS if name in environ]
    if world.coordinator is None:
        unread = f"; {', '.join(names)} in the environment" * bool(names)
        return [Row("processes", f"one{unread}"), _own_name()]
    given = config.count is not None or config.coordinator is not None or not names
    sources = ["the config"] * given + [f"the environment ({', '.join(names)})"] * bool(names)
    row = Row("processes", f"{world.name}, by {' and '.join(sources)}")
    return [row, _own_name(), resolved(world.coordinator)]


def _own_name() -> Row:
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        remedy = "add it to /etc/hosts: gloo, which joins simulated devices, asks for it"
        return note("host", f"{name}, which has no address", remedy)
    return Row("host", f"{name} is {found}")


# ---- once they have joined -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that a process tells the first one.

    Args:
        host: its name.
        versions: of packages.
        devices: kinds and numbers.
        sees: whether it sees a file that the first process has written in the run directory.
            None: there is none to look for.
        problems: its rows that are problems, as (section, name, finding, remedy).
    """

    host: str
    versions: dict[str, str]
    devices: list[list[Any]]
    sees: bool | None
    problems: list[list[str]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        return cls(**json.loads(text))


class Exchange:
    """Messages of processes through the coordination service; all call the same methods.

    Args:
        world: the processes, which have joined.
        clock: seconds since 1970.
    """

    def __init__(self, world: World, *, clock: Callable[[], float] = time.time) -> None:
        self._world, self._clock = world, clock

    def gather(self, facts: Facts) -> list[Facts]:
        """The facts of all processes, in their order."""
        coordination.put(f"doctor/facts/{self._world.id}", facts.to_json())
        coordination.barrier("doctor.facts", seconds=PATIENCE)
        found = coordination.get_all("doctor/facts")
        return [Facts.from_json(found[str(rank)]) for rank in range(self._world.count)]

    def clocks(self) -> list[tuple[float, float]]:
        """Seconds by which each process's clock is ahead of the first one's, and the error.

        The first process asks each of the others for its time, which it receives between the
        beginning and the end of the question: the error is half of that. The quickest of
        several questions counts. Empty in the other processes.
        """
        if self._world.id:
            self._answer()
            return []
        return [(0.0, 0.0), *(self._asked(rank) for rank in range(1, self._world.count))]

    def _asked(self, rank: int) -> tuple[float, float]:
        found = []
        for ping in range(PINGS):
            start, since = self._clock(), time.perf_counter()
            coordination.put_first(f"doctor/ask/{rank}/{ping}", "")
            answer = coordination.wait_for_first(f"doctor/time/{rank}/{ping}", seconds=PATIENCE)
            half = (time.perf_counter() - since) / 2
            found.append((half, float(answer) - (start + half)))
        error, ahead = min(found)
        return ahead, error

    def _answer(self) -> None:
        for ping in range(PINGS):
            place = f"{self._world.id}/{ping}"
            coordination.wait_for_first(f"doctor/ask/{place}", seconds=PATIENCE * self._world.count)
            coordination.put_first(f"doctor/time/{place}", repr(self._clock()))

    def seen(self, folder: Path | None) -> bool | None:
        """Looks for a file that the first process has written.

        None: there is no folder, or the first process cannot write there.
        """
        if folder is None:
            return None
        name, mine = "doctor/file", None
        if self._world.id == 0:
            mine = folder / f".jaxptd-doctor-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):  # for which the folder has a row already
                mine.touch()
            coordination.put_first(name, mine.name if os.path.exists(mine) else "")
        try:
            theirs = coordination.wait_for_first(name, seconds=PATIENCE)
            _, _, names = next(os.walk(folder), ("", [], []))  # none if it cannot be read
            sees = theirs in names if theirs else None
            coordination.barrier("doctor.file", seconds=PATIENCE)
        finally:
            if mine is not None:
                with contextlib.suppress(OSError):
                    mine.unlink()
        return sees

    def agreed(self, code: int) -> int:
        """The first process's exit code, in all processes."""
        if self._world.id == 0:
            coordination.put_first("doctor/code", str(code))
            return code
        return int(coordination.wait_for_first("doctor/code", seconds=PATIENCE))


def join(world: World, config: ProcessesConfig, *, devices: int) -> tuple[Row, Exchange | None]:
    """Lets the processes meet, and joins them if all have come.

    Args:
        world: as found; more than one process.
        config: of the processes.
        devices: of the layout, or as many as there are processes.

    Returns:
        a row on the meeting, and the messages of the processes if they have joined.

    Raises:
        UserError: they have met, but do not join.
    """
    met = meet(world, seconds=config.wait)
    if met.is_complete:
        coordination.join(world, config, devices=devices)
    return met_row(world, met), Exchange(world) if met.is_complete else None


def compared(facts: Sequence[Facts], clocks: Sequence[tuple[float, float]]) -> list[Row]:
    """A row for each process, and rows on problems that the others have found on their hosts."""
    rows = [
        each
        for rank, fact in enumerate(facts)
        for each in _process(rank, fact, facts[0], clocks[rank])
    ]
    if len(facts) > MOST:
        rows = [each for each in rows if each.verdict is not Verdict.OK]
        rows.insert(0, Row("processes", f"{len(facts)} on {len({f.host for f in facts})} hosts"))
    return [*rows, *_elsewhere(facts)]


def _process(rank: int, fact: Facts, first: Facts, clock: tuple[float, float]) -> Iterator[Row]:
    name = f"process {rank}"
    devices = ", ".join(f"{count} x {kind}" for kind, count in fact.devices) or "no devices"
    ahead, error = clock
    shown = f"; clock {ahead:+.3f} s (within {error:.3f} s)" if rank else ""
    sure = max(0.0, abs(ahead) - error)
    remedy = "let NTP or chrony set the clocks: times in logs and of credentials depend on them"
    yield judged(
        name,
        f"{fact.host}: {devices}{shown}",
        bad=remedy if sure > WRONG else "",
        remark=remedy if sure > LATE else "",
    )
    for package in sorted({*fact.versions, *first.versions}):
        here, there = (each.versions.get(package, "none") for each in (fact, first))
        if here != there:
            remedy = "use the same environment on all hosts"
            yield problem(name, f"{package} {here}, process 0 has {there}", remedy)
    if fact.devices != first.devices:
        remedy = "give each process the same number of devices of one kind"
        yield problem(name, f"other devices than process 0 ({devices})", remedy)
    if fact.sees is False:
        remedy = "use a directory that all hosts share"
        yield problem(name, "does not see process 0's files in the run directory", remedy)


def _elsewhere(facts: Sequence[Facts]) -> Iterator[Row]:
    """A row for each problem that other processes than the first have found, with their numbers."""
    own = set(map(tuple, facts[0].problems))
    found: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for rank, fact in enumerate(facts[1:], start=1):
        for each in map(tuple, fact.problems):
            if each not in own:
                found[each].append(rank)
    for (section, name, finding, remedy), ranks in found.items():
        where = f"{facts[ranks[0]].host}, {section}, {name}"
        yield problem(f"process {_ranges(ranks)}", f"{where}: {finding}", remedy)


def _ranges(ranks: Iterable[int]) -> str:
    """Numbers with ranges: `1-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
