"""The order of devices by their place in the network, and axes that leave NVLink domains."""

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd import mesh, topology
from jaxptd.config import ProcessesConfig
from jaxptd.distributed import coordination
from jaxptd.distributed.launchers import World
from jaxptd.errors import UserError
from jaxptd.layout import Axis, Layout
from jaxptd.mesh import draw_links, ranks_along
from jaxptd.topology import (
    NetworkPlace,
    known_domains,
    network_order,
    place_of,
    split_groups,
    spread,
)


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class GPU(Device):
    slice_index: int


@pytest.fixture
def places(monkeypatch):
    """Lets a test say the places of processes."""
    monkeypatch.setattr(topology, "_places", {})
    return topology.remember


def order(devices):
    return [device.id for device in network_order(devices)]


def test_without_places_devices_are_in_the_order_of_processes(places):
    assert order([Device(0, 0), Device(1, 1), Device(2, 0), Device(3, 1)]) == [0, 2, 1, 3]


def test_what_nvlink_joins_is_together_in_whatever_order_processes_were_numbered(places):
    gpus = [GPU(process, process, slice_index) for process, slice_index in enumerate([1, 0, 1, 0])]
    assert order(gpus) == [0, 2, 1, 3]


def test_a_given_domain_counts_more_than_the_drivers(places):
    places({0: NetworkPlace(7), 1: NetworkPlace(3), 2: NetworkPlace(7)})
    gpus = [GPU(0, 0, 0), GPU(1, 1, 1), GPU(2, 2, 2)]
    assert order(gpus) == [0, 2, 1]
    assert known_domains(gpus) == [7, 3, 7]


def test_a_domain_is_given_to_all_processes_or_to_none(places):
    with pytest.raises(UserError, match="to some processes, but not to process 1; give it to all"):
        places({0: NetworkPlace(7), 1: NetworkPlace()})


def test_domains_and_their_nodes_are_in_the_order_of_the_network(places):
    addresses = ["s2.a", "s1.b", "s2.b", "s1.a"]
    places(
        {rank: NetworkPlace(None, tuple(name.split("."))) for rank, name in enumerate(addresses)}
    )
    assert order([GPU(rank, rank, rank % 2) for rank in range(4)]) == [3, 1, 0, 2]
    # One switch has the nodes of two domains: these stay whole.
    assert order([GPU(rank, rank, rank // 2) for rank in range(4)]) == [3, 2, 1, 0]


def test_of_processes_without_devices_known_to_nvlink_no_domain_is_claimed(places):
    devices = [Device(0, 0), Device(1, 1)]
    assert known_domains(devices) == []
    assert list(split_groups(Layout(tp=2), known_domains(devices))) == []
    places({0: NetworkPlace(0), 1: NetworkPlace(1)})
    assert known_domains(devices) == [0, 1]


@pytest.mark.parametrize(
    ("given", "environ", "place"),
    [
        ((None, None), {}, NetworkPlace()),
        (
            (None, None),
            {topology.SLURM: "s0.s4.node17"},
            NetworkPlace(None, ("s0", "s4", "node17")),
        ),
        ((3, "rack1.node2"), {topology.SLURM: "s0.s4.node17"}, NetworkPlace(3, ("rack1", "node2"))),
        ((0, ""), {topology.SLURM: "s0.s4.node17"}, NetworkPlace(0)),
    ],
)
def test_the_config_says_the_place_or_slurm(given, environ, place):
    found = place_of(*given, environ)
    assert found == place
    assert NetworkPlace.read(found.written()) == place


# ---- the groups of a layout among domains --------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
    size=st.integers(1, 9),
)
def test_groups_extend_over_the_domains_of_their_ranks(sizes, size):
    """Against the groups of `ranks_along`, one by one."""
    layout = Layout(pp=sizes[0], dp=sizes[1], cp=sizes[2])
    domains = [rank // size for rank in range(layout.num_devices)]
    found = spread(layout, domains)
    for axis in (Axis.PP, Axis.DP, Axis.CP):
        if layout.sizes[axis] > 1:
            groups = ranks_along(layout, axis)
            assert found[axis].domains == max(len({domains[r] for r in group}) for group in groups)
            assert found[axis].stride == groups[0][1] - groups[0][0]


def test_only_axes_that_leave_a_domain_use_network_cards():
    found = spread(Layout(dp=2, tp=4), of(4, 8))
    assert {axis: each.rails for axis, each in found.items()} == {Axis.TP: 0, Axis.DP: 1}


def test_a_mesh_is_in_the_order_of_the_network(monkeypatch):
    monkeypatch.setattr(mesh, "network_order", lambda devices: devices[::-1])
    assert [*mesh.make_mesh(Layout(dp=2)).devices.flat] == jax.devices()[:-3:-1]
    assert [*mesh.make_mesh(Layout(dp=2), jax.devices()).devices.flat] == jax.devices()[:2]


def test_processes_tell_each_other_where_they_are_and_xla_their_domain(monkeypatch, places):
    said, given = {"1": NetworkPlace(3, ("a", "c")).written()}, {}

    def put(key: str, value: str) -> None:
        said[key.removeprefix("places/")] = value

    monkeypatch.setattr(coordination, "put", put)
    monkeypatch.setattr(coordination, "get_all", lambda folder: said)
    monkeypatch.setattr(coordination, "barrier", lambda name, **_: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    config = ProcessesConfig(domain=7, place="a.b")
    coordination.join(World(2, 0, "127.0.0.1:1"), config, devices=2)
    assert given["partition_index"] == 7
    assert known_domains([Device(0, 0), Device(1, 1)]) == [7, 3]
    assert order([Device(0, 1), Device(1, 0)]) == [1, 0]


def of(size: int, devices: int) -> list[int]:
    return [rank // size for rank in range(devices)]


@pytest.mark.parametrize(
    ("layout", "size", "said"),
    [
        (Layout(dp=8, tp=8), 8, []),
        (Layout(dp=4, cp=2, tp=8), 8, []),  # a ring over two nodes
        (Layout(dp=8, tp=9), 72, []),
        (
            Layout(dp=9, tp=8),
            12,
            [
                "layout.tp=8: some of its groups lie in 2 NVLink domains where 1 would hold them "
                "(domains have 12 devices); make 8, the product of tp and the axes inside it, a "
                "divisor of 12, or leave devices of each domain out"
            ],
        ),
        (
            Layout(tp=16),
            8,
            [
                "layout.tp=16: each group lies in 2 NVLink domains of 8 devices, so every layer's "
                "activations cross the network; use at most 8"
            ],
        ),
        (
            Layout(row=4, col=4),
            8,
            [
                "layout.row=4: each group lies in 2 NVLink domains of 8 devices, so every layer's "
                "activations cross the network; use at most 2"
            ],
        ),
    ],
    ids=["node", "ring", "rack", "border", "two-nodes", "grid"],
)
def test_what_is_said_of_axes_that_leave_their_domains(layout, size, said):
    assert list(split_groups(layout, of(size, layout.num_devices))) == said


def test_domains_may_differ_in_size():
    domains = [0] * 8 + [1] * 4 + [2] * 4
    assert list(split_groups(Layout(dp=4, tp=4), domains)) == []
    (said,) = split_groups(Layout(dp=2, tp=8), domains)
    assert "domains of 4 to 8 devices" in said


def test_links_are_listed_with_the_network_cards_that_a_group_uses():
    lines = draw_links(Layout(dp=2, cp=4, tp=4), 8).splitlines()
    assert lines[1:] == [
        "tp 4  neighbours       inside a node, by NVLink",
        "cp 4  4 ranks apart    over 2 nodes, by 2 network cards of each",
        "dp 2  16 ranks apart   over 2 nodes, by 1 network card of each",
    ]
