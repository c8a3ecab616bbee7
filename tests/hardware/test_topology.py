"""Groups of devices: their members per node, and the link that limits them."""

import pytest

from jaxptd.hardware import Cluster, Group, find_accelerator

A100 = find_accelerator("a100")
NVLINK, RAIL = (
    A100.nvlink_bandwidth * A100.nvlink_share,
    A100.network_bandwidth * A100.network_share,
)


@pytest.mark.parametrize(
    ("group", "inside", "nodes", "bandwidth", "resource"),
    [
        (Group(8), 8, 1, NVLINK, "NVLink"),
        (Group(2, 4), 2, 1, NVLINK, "NVLink"),
        (Group(16), 8, 2, 8 * RAIL, "network"),
        (Group(16, 2), 4, 4, 4 * RAIL, "network"),
        (Group(16, 8), 1, 16, RAIL, "network"),
        (Group(4, 64), 1, 4, RAIL, "network"),
    ],
)
def test_a_ring_has_as_many_rails_as_members_in_a_node(
    group: Group, inside: int, nodes: int, bandwidth: float, resource: str
) -> None:
    cluster = Cluster(A100)
    assert cluster.links(group).local == inside
    assert cluster.links(group).nodes == nodes
    assert cluster.links(group).bandwidth == bandwidth
    assert cluster.links(group).resource == resource


def test_rails_carry_no_more_than_nvlink_and_nodes_may_be_smaller() -> None:
    gb200 = Cluster(find_accelerator("gb200"))
    assert gb200.node_size == 72
    assert gb200.links(Group(144)).resource == "NVLink"  # 72 rails are faster than NVLink
    assert Cluster(A100, node=4).links(Group(8)).nodes == 2
