"""Finds which processes of a run can reach the first one, before JAX joins them.

JAX ends a process whose partners do not join in time, without saying which. So the processes first
meet at the coordinator's address by plain TCP: each says its number, and the first one answers when
all have come or the time is over.
"""

import contextlib
import dataclasses
import os
import socket
import time

from jaxptd.distributed.launchers import World
from jaxptd.doctor.page import Row, judged, problem

HELLO = "jaxptd"
RETRY = 0.2  # seconds between two attempts to connect
TURN = 10.0  # seconds for one line of another process


@dataclasses.dataclass(frozen=True)
class Met:
    """The outcome of a meeting.

    Args:
        missing: numbers of the processes that did not come. None: this process met nobody.
        doubled: numbers that came twice.
        reason: why this process met nobody.
    """

    missing: tuple[int, ...] | None = ()
    doubled: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_complete(self) -> bool:
        return self.missing == () and not self.doubled


def address(coordinator: str) -> tuple[str, int]:
    """Host and port, without the brackets of an IPv6 address.

    >>> address("[::1]:55527"), address("node01:5555")
    (('::1', 55527), ('node01', 5555))
    """
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def resolved(coordinator: str) -> Row:
    """A row on whether the coordinator's host has an address."""
    host, port = address(coordinator)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "name the first host as all hosts know it, with processes.coordinator"
        return problem("coordinator", f"{coordinator}: {error.strerror or error}", remedy)
    return Row("coordinator", f"{coordinator} is {found[0][4][0]}")


def meet(world: World, *, seconds: float) -> Met:
    """Meets the other processes.

    Args:
        world: the processes; more than one.
        seconds: longest wait.
    """
    assert world.coordinator is not None
    deadline = time.monotonic() + seconds
    if world.id == 0:
        return _receive(world, address(world.coordinator)[1], deadline)
    return _visit(world, address(world.coordinator), deadline)


def _receive(world: World, port: int, deadline: float) -> Met:
    """Waits for the others in the first process, and tells them the outcome."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        return Met(None, reason=f"cannot listen at port {port}: {_why(error)}")
    came: dict[int, socket.socket] = {}
    doubled: set[int] = set()
    with server, contextlib.ExitStack() as guests:
        while len(came) + 1 < world.count and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError):
                guest = guests.enter_context(server.accept()[0])
                rank = _heard(guest)
                if rank is not None and rank < world.count:
                    doubled |= {rank} & {0, *came}
                    came[rank] = guest
        missing = set(range(1, world.count)) - came.keys()
        numbers = tuple(sorted(missing)), tuple(sorted(doubled))
        answer = ";".join(" ".join(map(str, each)) for each in numbers)
        for guest in came.values():
            with contextlib.suppress(OSError):
                guest.sendall(f"{answer}\n".encode())
                guest.recv(1)  # until it closes: then it, and not this port, waits for a while
    return Met(*numbers)


def _heard(guest: socket.socket) -> int | None:
    """The number that a visitor says; None if it speaks of something else."""
    guest.settimeout(TURN)
    words = _line(guest).split()
    if len(words) == 2 and words[0] == HELLO and words[1].isdecimal():
        return int(words[1])
    return None


def _visit(world: World, place: tuple[str, int], deadline: float) -> Met:
    """Goes to the first process and waits for the outcome."""
    reason = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=min(left, TURN)) as host:
                host.settimeout(left + TURN)
                host.sendall(f"{HELLO} {world.id}\n".encode())
                missing, separator, doubled = _line(host).partition(";")
                if separator:
                    return Met(_numbers(missing), _numbers(doubled))
                reason = "what listens there is another program"
        except OSError as error:
            reason = _why(error)
        time.sleep(RETRY)
    return Met(None, reason=f"cannot reach the first process: {reason}")


def _why(error: OSError) -> str:
    """The system's words, to which Python may add more."""
    return os.strerror(error.errno) if error.errno else str(error)


def _line(connection: socket.socket) -> str:
    """A line that the other side says, without its end; empty if it says none."""
    said = b""
    while not said.endswith(b"\n") and len(said) < 10**6:
        piece = connection.recv(4096)
        if not piece:
            break
        said += piece
    return said.decode("ascii", "replace").strip() if said.endswith(b"\n") else ""


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(map(int, words.split()))


def met_row(world: World, met: Met) -> Row:
    """A row on the outcome."""
    if met.missing is None:
        remedy = "open that port between the hosts, free it, or set another processes.coordinator"
        return problem("meeting", met.reason, remedy)
    came = world.count - len(met.missing)
    bad = ""
    if met.missing:
        which = f"process{'es' * (len(met.missing) > 1)} {_some(met.missing)}"
        bad = f"start {which}, or see what keeps them from reaching the first one"
    if met.doubled:
        bad = f"give each process its own processes.id: {_some(met.doubled)} came twice"
    return judged("meeting", f"{came} of {world.count} processes came to the first one", bad=bad)


def _some(numbers: tuple[int, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + f" and {len(numbers) - most} more" * (len(numbers) > most)
