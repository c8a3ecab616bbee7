"""Where devices are in the network: which of them NVLink joins, and which nodes are neighbours.

A *domain* is the devices that NVLink joins: a node of 8, or a rack of 36 or 72. JAX reads it from
the driver (`device.slice_index`), or `processes.domain` says it. A *place* is a node's position in
the network, such as `rack3.switch1.node17`. Slurm says it, or `processes.place` does.

Ranks of the mesh follow `network_order`: domains are blocks of consecutive ranks, and so the axes
that move the most bytes, which are the innermost, stay inside. `spread` says what became of each
axis, and `split_groups` what is in the way.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxptd.errors import UserError
from jaxptd.layout import Axis, Layout

SLURM = "SLURM_TOPOLOGY_ADDR"  # switches from the top of the network down, and the node
MATMULS = (Axis.ROW, Axis.COL, Axis.TP)  # collectives inside every layer, which nothing hides


@dataclasses.dataclass(frozen=True)
class NetworkPlace:
    """The place of a process's devices.

    Args:
        domain: number of their NVLink domain. None is what the driver says.
        address: names from the top of the network down to the node. Empty if unknown.
    """

    domain: int | None = None
    address: tuple[str, ...] = ()

    def written(self) -> str:
        """The place as text, to tell other processes."""
        return json.dumps([self.domain, self.address])

    @classmethod
    def read(cls, text: str) -> "NetworkPlace":
        """From what `written` returned."""
        domain, address = json.loads(text)
        return cls(domain, tuple(address))


UNKNOWN = NetworkPlace()
_places: dict[int, NetworkPlace] = {}  # by process, as they told each other when they joined


def place_of(domain: int | None, place: str | None, environ: Mapping[str, str]) -> NetworkPlace:
    """The place of this process: what the config says, else Slurm."""
    named = environ.get(SLURM, "") if place is None else place
    return NetworkPlace(domain, tuple(named.split(".")) if named else ())


def remember(places: Mapping[int, NetworkPlace]) -> None:
    """Keeps the places of all processes for every mesh that is made from now on.

    Raises:
        UserError: only some processes have been given a domain. The driver's numbers of the others
            could be the same by chance.
    """
    unknown = [process for process, place in places.items() if place.domain is None]
    if 0 < len(unknown) < len(places):
        raise UserError(
            f"processes.domain is given to some processes, but not to process {min(unknown)}; "
            "give it to all of them, or to none"
        )
    _places.clear()
    _places.update(places)


def domain_of(device: Any) -> int:
    """The NVLink domain of a device.

    It is the number that its process was given, else XLA's (a GPU has the number of its domain as
    its slice), else its process: on other devices, a process is taken for a node.
    """
    given = _places.get(device.process_index, UNKNOWN).domain
    index = getattr(device, "slice_index", None) if given is None else given
    return int(device.process_index if index is None else index)


def known_domains(devices: Sequence[Any]) -> list[int]:
    """The NVLink domain of each device, in the order of `devices`; empty where it is a guess."""
    given = any(place.domain is not None for place in _places.values())
    known = given or all(hasattr(device, "slice_index") for device in devices)
    return [domain_of(device) for device in devices] if known else []


def network_order(devices: Sequence[Any]) -> list[Any]:
    """Sorts devices so that those of a domain, and then of a node, are consecutive.

    Domains, and the nodes within one, are in the order of their addresses, so that neighbours in
    the network are neighbours here. Without addresses they are in the order of their processes. A
    stable sort keeps JAX's order within a process.
    """

    def where(device: Any) -> tuple[tuple[str, ...], int]:
        process = device.process_index
        return _places.get(process, UNKNOWN).address, process

    first: dict[int, tuple[tuple[str, ...], int]] = {}  # of each domain
    for device in devices:
        domain = domain_of(device)
        first[domain] = min(first.get(domain, where(device)), where(device))
    return sorted(devices, key=lambda device: (first[domain_of(device)], where(device)))


# ---- the groups of a layout among domains --------------------------------------------------------


class Spread(NamedTuple):
    """The groups of an axis among domains.

    members: devices of a group.
    stride: distance of their ranks.
    domains: over which a group extends, at most.
    fewest: over how many it had to, if all had the size of the smallest.
    rails: network cards that each domain uses for a group; 0 inside one domain.
    """

    members: int
    stride: int
    domains: int
    fewest: int
    rails: int


def spread(layout: Layout, domains: Sequence[int]) -> dict[Axis, Spread]:
    """The extent of the groups of each axis of more than one device, innermost axis first.

    >>> spread(Layout(dp=2, tp=4), [0, 0, 0, 0, 1, 1, 1, 1])[Axis.DP]
    Spread(members=2, stride=4, domains=2, fewest=2, rails=1)

    Args:
        layout: gives each device its rank.
        domains: the domain of each rank, at least one.
    """
    size = min(collections.Counter(domains).values())
    sizes, spreads, stride = layout.sizes, {}, 1
    for axis in reversed(Axis):
        members = sizes[axis]
        if members == 1:
            continue
        most = max(len(set(group)) for group in _groups(domains, members, stride))
        together = max(1, min(members, size // stride))
        rails = 0 if most == 1 else together
        spreads[axis] = Spread(members, stride, most, math.ceil(members / together), rails)
        stride *= members
    return spreads


def _groups(domains: Sequence[int], members: int, stride: int) -> Iterator[Sequence[int]]:
    """The domains of each group of ranks that are `stride` apart."""
    for begin in range(0, len(domains), members * stride):
        for first in range(begin, begin + stride):
            yield domains[first : first + members * stride : stride]


def split_groups(layout: Layout, domains: Sequence[int]) -> Iterator[str]:
    """Yields a sentence for each axis whose collectives use slower links than they could.

    They do if a group lies across the border of a domain that would hold it, or if a matmul's
    devices, which exchange activations in every layer, are more than a domain has.
    """
    counts = collections.Counter(domains)
    if len(counts) < 2:
        return
    sizes = sorted(set(counts.values()))
    number = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    for axis, found in spread(layout, domains).items():
        where = f"layout.{axis}={found.members}"
        if found.domains > found.fewest:
            block = found.members * found.stride
            yield (
                f"{where}: some of its groups lie in {found.domains} NVLink domains where "
                f"{found.fewest} would hold them (domains have {number} devices); make {block}, "
                f"the product of {axis} and the axes inside it, a divisor of {sizes[0]}, or leave "
                "devices of each domain out"
            )
        elif found.domains > 1 and axis in MATMULS:
            yield (
                f"{where}: each group lies in {found.domains} NVLink domains of {number} devices, "
                f"so every layer's activations cross the network; use at most "
                f"{max(1, sizes[0] // found.stride)}"
            )
