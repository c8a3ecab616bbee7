"""The address at which a process serves the others."""

import pytest

from jaxptd.distributed import coordination
from jaxptd.distributed.coordination import _from_elsewhere, _way_to_first, own_host


@pytest.mark.parametrize(
    ("host", "seen", "address"),
    [
        (
            "10.0.0.1",
            [["a", "10.0.0.1"], ["b", "10.9.0.1"]],
            "10.0.0.1",
        ),  # a service's, not its own
        ("127.0.1.1", [["a", "127.0.1.1"], ["a", "127.0.1.1"], ["b", "10.0.0.1"]], "10.0.0.1"),
        ("127.0.0.1", [["a", "127.0.0.1"], ["a", "127.0.0.1"]], "127.0.0.1"),  # all on one host
        ("::1", [["a", "::1"], ["b", "fd00::1"]], "fd00::1"),
        ("fe80::1%eth0", [["a", "fe80::1%eth0"], ["b", "fe80::1%eth0"]], "fe80::1%eth0"),
    ],
)
def test_process_0_is_reached_from_other_hosts(host, seen, address):
    assert _from_elsewhere(host, seen) == address


@pytest.mark.parametrize("address", [None, "127.0.0.1:5555", "localhost:5555"])
def test_the_way_to_process_0(address, monkeypatch):
    monkeypatch.setattr(coordination._state(), "coordinator_address", address)
    assert set(_way_to_first()) <= {"127.0.0.1", "::1"}
    assert own_host() in ("127.0.0.1", "::1")
