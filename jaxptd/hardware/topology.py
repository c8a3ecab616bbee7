"""Groups of devices, and the links that a collective among them uses.

Devices are numbered as the mesh has them: tp from the inside, then cp, dp, pp. A node is a domain
of NVLink; every device has a network card of its own, a rail.
"""

import dataclasses
import math

from jaxptd.hardware.table import Accelerator


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices with numbers `stride` apart.

    Args:
        members: n, 1 or more.
        stride: k, 1 or more.
    """

    members: int
    stride: int = 1


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind in nodes.

    Args:
        accelerator: their limits.
        node: devices of a node; 0: as many as NVLink joins.
    """

    accelerator: Accelerator
    node: int = 0

    @property
    def node_size(self) -> int:
        return self.node or self.accelerator.nvlink_domain

    def local_members(self, group: Group) -> int:
        """Members of a group that share a node: min(n, node / k)."""
        return max(1, min(group.members, self.node_size // group.stride))

    def nodes(self, group: Group) -> int:
        """Nodes over which a group is spread."""
        return math.ceil(group.members / self.local_members(group))

    def bandwidth(self, group: Group) -> float:
        """Bytes a second that each member of a ring sends, at most.

        A ring in a node uses NVLink. A ring over nodes leaves a node once for each rail, and has
        as many rails as members in a node.
        """
        a = self.accelerator
        nvlink = a.nvlink_bandwidth * a.nvlink_share
        if self.nodes(group) == 1:
            return nvlink
        return min(nvlink, self.local_members(group) * self.rail)

    @property
    def rail(self) -> float:
        """Bytes a second of one device's network card."""
        return self.accelerator.network_bandwidth * self.accelerator.network_share

    def resource(self, group: Group) -> str:
        """Name of the link that bounds a group: `NVLink` or `network`."""
        a = self.accelerator
        inside = self.bandwidth(group) >= a.nvlink_bandwidth * a.nvlink_share
        return "NVLink" if inside else "network"
