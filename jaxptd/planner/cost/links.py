"""Seconds of collectives and messages between devices."""

import math

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.hardware import Cluster, Group
from jaxptd.planner.cost.terms import Term

# Seconds of a collective of few bytes: a first part, and for each further member in a node; fitted
# to all-reduces of 1 MiB on 2, 4 and 8 A100s (vTrain's profiles: 44, 51, 93 us). A pass over nodes
# adds HOP for each doubling of their number (NCCL's trees).
START, MEMBER, HOP = 14e-6, 4e-6, 5e-6
# Members up to which collectives keep their rate, and the power by which it falls beyond: judged,
# since no row here has such a group; a ring of n members is only as fast as its slowest link.
WIDE, WIDER = 512, 0.25
RINGS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1}  # passes


def collective(cluster: Cluster, kind: str, group: Group, size: float) -> Term:
    """A collective: a ring, or for a permute or a broadcast one message of each member.

    Args:
        cluster: of the devices.
        kind: XLA's name, one of `jaxptd.analysis.collective`.
        group: its members.
        size: bytes of the whole array: of the sum, or of what all members have together.
    """
    n = group.members
    if n == 1:
        return Term("", "", 0.0, cluster.resource(group))
    passes = RINGS.get(kind, 1)
    sent = passes * (n - 1) / n * size if kind in RINGS else size
    rate = cluster.bandwidth(group) * min(1.0, (WIDE / n) ** WIDER)
    if kind not in RINGS and cluster.nodes(group) > 1:  # one of the messages has one rail
        rate = cluster.rail
    seconds = sent / rate + passes * _latency(cluster, group)
    return Term("", "", seconds, cluster.resource(group), 0.0, sent)


def _latency(cluster: Cluster, group: Group) -> float:
    nodes = cluster.nodes(group)
    inside = START + MEMBER * (cluster.local_members(group) - 1)
    return inside + (HOP * math.log2(nodes) if nodes > 1 else 0.0)


def message(cluster: Cluster, size: float, *, inside: bool) -> Term:
    """A message of one device to another, in its node or beyond."""
    a = cluster.accelerator
    rate = a.nvlink_bandwidth * a.nvlink_share if inside else cluster.rail
    resource = "NVLink" if inside else "network"
    return Term("", "", size / rate + START + HOP, resource, 0.0, size)
