"""Chooses what is timed on a machine, most important first."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.calibration.samples import (
    Attention,
    Dispatch,
    Exchange,
    Pass,
    Product,
    Sample,
    SmallKernels,
)
from jaxptd.hardware import Group

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that are measured.

    Args:
        devices: on all nodes.
        node: devices of each node.
        memory: bytes of a device that may be used; 0: unknown.
        fp8: whether it has products in 8 bits.
    """

    devices: int
    node: int
    memory: int = 0
    fp8: bool = False

    @property
    def nodes(self) -> int:
        return self.devices // self.node


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of samples.

    Args:
        products: (M, N, K) of each.
        passes: bytes of the array of each.
        attention: (tokens, heads) of each.
        exchanges: bytes, largest first.
    """

    products: Sequence[tuple[int, int, int]]
    passes: Sequence[int]
    attention: Sequence[tuple[int, int]]
    exchanges: Sequence[int]


# A GPU takes a millisecond or more for most of these, so that a launch is less than a hundredth.
ACCELERATOR = Sizes(
    products=((8192, 8192, 8192), (8192, 28672, 8192), (16384, 16384, 16384), (4096, 4096, 4096)),
    passes=(2048 * MIB, 512 * MIB),
    attention=((8192, 32), (4096, 64)),
    exchanges=(256 * MIB, 64 * MIB, 16 * MIB, MIB),
)
CPU = Sizes(
    products=((512, 512, 512), (256, 1024, 256)),
    passes=(16 * MIB, 4 * MIB),
    attention=((256, 4),),
    exchanges=(MIB, MIB // 4),
)


def suite(machine: Machine, sizes: Sizes) -> list[Sample]:
    """The samples of a machine: one for each number, then second ones, and so on.

    Those that need more than half of a device's memory are left out.
    """
    lists: list[list[Sample]] = [
        [Product(*size) for size in sizes.products],
        [Pass(size) for size in sizes.passes],
        [Attention(*size) for size in sizes.attention],
        [Attention(*size, backward=True) for size in sizes.attention],
        list(_inside(machine, sizes.exchanges)),
        list(_across(machine, sizes.exchanges)),
        [SmallKernels(), Dispatch()],
        [Product(*sizes.products[0], fp8=True)] * machine.fp8,
    ]
    room = machine.memory / 2 if machine.memory else float("inf")
    return [sample for sample in _in_turn(lists) if sample.bytes <= room]


def _in_turn(lists: Iterable[Sequence[Sample]]) -> Iterator[Sample]:
    for row in itertools.zip_longest(*lists):
        yield from (sample for sample in row if sample is not None)


def _inside(machine: Machine, sizes: Sequence[int]) -> Iterator[Sample]:
    """Collectives in a node: of all its devices first, of powers of two otherwise."""
    powers = (2**i for i in range(1, machine.node.bit_length()))
    members = {machine.node, *(n for n in powers if machine.node % n == 0)} - {1}
    for size, n, kind in itertools.product(sizes, sorted(members, reverse=True), KINDS):
        yield Exchange(kind, Group(n), size)


def _across(machine: Machine, sizes: Sequence[int]) -> Iterator[Sample]:
    """Collectives of one device of each node, which have a network card each."""
    if machine.nodes > 1:
        for size, kind in itertools.product(sizes, KINDS):
            yield Exchange(kind, Group(machine.nodes, machine.node), size, crosses=True)
