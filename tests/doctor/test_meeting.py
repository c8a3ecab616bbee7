"""Processes that meet by plain TCP: all, some, two with one number, or nobody."""

import contextlib
import socket
import threading

import pytest
from together import free_port

from jaxptd.distributed.launchers import World
from jaxptd.doctor.meeting import Met, address, meet, met_row, resolved
from jaxptd.doctor.page import Verdict


def meeting(count: int, ranks: list[int], *, seconds: float = 20.0) -> dict[int, Met]:
    """Lets these of `count` processes meet, each in a thread; the outcome of each."""
    coordinator = f"127.0.0.1:{free_port()}"
    found: dict[int, Met] = {}

    def go(rank: int) -> None:
        found[rank] = meet(World(count, rank, coordinator), seconds=seconds)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_meet() -> None:
    found = meeting(4, [3, 1, 2, 0])
    assert found == dict.fromkeys(range(4), Met())
    row = met_row(World(4, 0, "a:1"), found[0])
    assert (row.verdict, row.finding) == (Verdict.OK, "4 of 4 processes came to the first one")


def test_those_who_are_missing_are_named_to_all() -> None:
    found = meeting(4, [0, 2], seconds=2.0)
    assert found == dict.fromkeys((0, 2), Met(missing=(1, 3)))
    row = met_row(World(4, 2, "a:1"), found[2])
    assert row.verdict is Verdict.PROBLEM
    assert row.finding == "2 of 4 processes came to the first one"
    assert row.remedy.startswith("start processes 1, 3, or")


def test_two_with_the_same_number() -> None:
    found = meeting(3, [0, 1, 1], seconds=2.0)
    assert found[0] == Met(missing=(2,), doubled=(1,))
    assert "1 came twice" in met_row(World(3, 0, "a:1"), found[0]).remedy
    assert not Met(doubled=(1,)).is_complete


def test_a_process_of_a_larger_run_does_not_count() -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    found: list[Met] = []
    first = threading.Thread(
        target=lambda: found.append(meet(World(2, 0, coordinator), seconds=20))
    )
    first.start()
    with connected(coordinator) as stranger:
        stranger.sendall(b"jaxptd 3\n")  # heard before the next one comes
        assert meet(World(2, 1, coordinator), seconds=20.0) == Met()
    first.join()
    assert found == [Met()]


def connected(coordinator: str) -> socket.socket:
    """A connection, once somebody listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address(coordinator), timeout=20)


def test_the_port_is_free_after_a_meeting() -> None:
    """JAX's service listens there next; a connection that this side closes first would keep it."""
    coordinator = f"127.0.0.1:{free_port()}"
    other = threading.Thread(target=meet, args=(World(2, 1, coordinator),), kwargs={"seconds": 20})
    other.start()
    assert meet(World(2, 0, coordinator), seconds=20.0) == Met()
    with socket.socket() as service:
        service.bind(address(coordinator))
    other.join()


def test_nobody_listens() -> None:
    (met,) = meeting(2, [1], seconds=0.3).values()
    assert met.missing is None
    assert "Connection refused" in met_row(World(2, 1, "a:1"), met).finding


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        met = meet(World(2, 0, coordinator), seconds=1.0)
    row = met_row(World(2, 0, coordinator), met)
    assert row.verdict is Verdict.PROBLEM
    assert row.finding.endswith("Address already in use")


def test_another_program_at_that_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            guest, _ = server.accept()
            guest.sendall(b"220 mail\n")
            guest.close()

        thread = threading.Thread(target=greet)
        thread.start()
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        met = meet(World(2, 1, coordinator), seconds=0.2)
        thread.join()
    assert met.reason.endswith("what listens there is another program")


@pytest.mark.parametrize("coordinator", ["no.such.host.invalid:5555", "[::zz]:1"])
def test_a_host_without_an_address(coordinator: str) -> None:
    assert resolved(coordinator).verdict is Verdict.PROBLEM
    assert resolved("127.0.0.1:5555").finding == "127.0.0.1:5555 is 127.0.0.1"
