"""Seconds of collectives, computed by hand."""

import pytest

from jaxptd.costs import kernels
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.costs.kernels import HOP, MEMBER, START
from jaxptd.hardware import Cluster, Group, find_accelerator

CLUSTER = Cluster(find_accelerator("a100"))
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE, BROADCAST)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_sends_what_the_project_counts(kind: str) -> None:
    counted = Collective(kind, ("tp",), 1, 800).wire_bytes({"tp": 8})
    assert kernels.collective(CLUSTER, kind, Group(8), 800).bytes == counted


def test_a_ring_in_a_node() -> None:
    rate = CLUSTER.links(Group(4)).bandwidth
    term = kernels.collective(CLUSTER, ALL_REDUCE, Group(4), 1e9)
    assert term.seconds == pytest.approx(1.5e9 / rate + 2 * (START + 3 * MEMBER))
    assert term.resource == "NVLink"
    halves = [kernels.collective(CLUSTER, kind, Group(4), 1e9) for kind in KINDS[1:3]]
    assert sum(half.seconds for half in halves) == pytest.approx(term.seconds)


def test_a_ring_over_nodes_waits_for_each_doubling_of_them() -> None:
    group = Group(32, 8)
    term = kernels.collective(CLUSTER, ALL_GATHER, group, 1e9)
    assert term.seconds == pytest.approx(31 / 32 * 1e9 / CLUSTER.rail + START + 5 * HOP)
    assert term.resource == "network"
    assert kernels.collective(CLUSTER, ALL_GATHER, Group(1), 1e9).seconds == 0


def test_a_permute_over_nodes_is_as_fast_as_one_rail() -> None:
    inside, beyond = (kernels.collective(CLUSTER, PERMUTE, Group(n), 1e9).seconds for n in (8, 16))
    assert inside == pytest.approx(1e9 / CLUSTER.links(Group(8)).bandwidth, rel=0.05)
    assert beyond == pytest.approx(1e9 / CLUSTER.rail, rel=0.05)


def test_small_collectives_take_as_long_as_measured() -> None:
    """44, 51 and 93 us for 1 MiB on 2, 4 and 8 A100s."""
    measured = {2: 44e-6, 4: 51e-6, 8: 93e-6}
    for n, seconds in measured.items():
        found = kernels.collective(CLUSTER, ALL_REDUCE, Group(n), 2**20).seconds
        assert found == pytest.approx(seconds, rel=0.16)


def test_wide_collectives_are_slower() -> None:
    near, far = (kernels.collective(CLUSTER, ALL_GATHER, Group(n, 8), 1e11) for n in (512, 8192))
    assert far.seconds == pytest.approx(2 * near.seconds, rel=0.01)


def test_a_message() -> None:
    inside = kernels.message(CLUSTER, 1e9, inside=True)
    beyond = kernels.message(CLUSTER, 1e9, inside=False)
    assert (inside.resource, beyond.resource) == ("NVLink", "network")
    assert beyond.seconds == pytest.approx(1e9 / CLUSTER.rail + START + HOP)
    assert inside.seconds < beyond.seconds
