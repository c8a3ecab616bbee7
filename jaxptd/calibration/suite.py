"""Chooses what to time on a machine, most important first."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxptd.costs import kernels
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.costs.terms import WAITING, Term
from jaxptd.hardware import Cluster, Group

# ---- samples: kernels and collectives to time, each with its time by the cost model --------------
# A sample's `number` is the share that it measures. Its term leaves out every other limit that
# could bound it, so that it has a fixed part and a part inversely proportional to that share.

SIZE = 2  # bytes of a value: bfloat16
SMALL = 64  # rows and columns of the matmuls that show how long a kernel launch takes
NO_LIMIT = math.inf


class Sample(Protocol):
    """One thing to time."""

    @property
    def number(self) -> str | None:
        """The number of the hardware table that it measures. None if its time is only reported."""

    @property
    def bytes(self) -> int:
        """Memory of its arrays on a device."""

    def term(self, cluster: Cluster) -> Term:
        """Its time by the cost model."""

    def __str__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Product:
    """A matmul `[M, K] x [K, N]`; `fp8` rounds both factors to 8 bits first, as layers do."""

    M: int
    N: int
    K: int
    fp8: bool = False

    @property
    def number(self) -> str | None:
        return None if self.fp8 else "products_share"

    @property
    def bytes(self) -> int:
        return SIZE * (2 * self.M * self.K + self.K * self.N + 2 * self.M * self.N)

    def term(self, cluster: Cluster) -> Term:
        cluster = with_numbers(cluster, {"hbm_bandwidth": NO_LIMIT})
        if self.fp8:
            cluster = with_numbers(cluster, {"bf16_flops": cluster.accelerator.fp8_flops})
        return kernels.product(cluster.accelerator, self.M, self.N, self.K)

    def __str__(self) -> str:
        return f"{'fp8 ' * self.fp8}matmul [{self.M}, {self.K}] x [{self.K}, {self.N}]"


@dataclasses.dataclass(frozen=True)
class Pass:
    """An elementwise kernel that reads an array and writes one of the same size."""

    size: int
    number: ClassVar[str] = "hbm_share"

    @property
    def bytes(self) -> int:
        return 3 * self.size

    def term(self, cluster: Cluster) -> Term:
        return kernels.moved(cluster.accelerator, 2.0 * self.size)

    def __str__(self) -> str:
        return f"elementwise pass over {_size(self.size)}"


@dataclasses.dataclass(frozen=True)
class Attention:
    """Causal attention of one sequence, with the project's kernel."""

    length: int
    heads: int
    head_size: int = 128
    backward: bool = False

    @property
    def number(self) -> str:
        return f"attention_{'backward' if self.backward else 'forward'}_share"

    @property
    def bytes(self) -> int:
        return 12 * SIZE * self.length * self.heads * self.head_size

    def term(self, cluster: Cluster) -> Term:
        flops = 4.0 * self.heads * self.length**2 * self.head_size / 2
        return kernels.flash(cluster.accelerator, flops, self.head_size, backward=self.backward)

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"attention {direction}, {self.length} tokens, {self.heads} heads"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective, in all groups of devices at once.

    Args:
        kind: XLA's name.
        group: its members.
        size: bytes of the whole array, as in `kernels.collective`.
        crosses: each member is on a different node, so that none uses NVLink.
    """

    kind: str
    group: Group
    size: int
    crosses: bool = False

    @property
    def number(self) -> str:
        return "network_share" if self.crosses else "nvlink_share"

    @property
    def bytes(self) -> int:
        return 3 * self.size

    def term(self, cluster: Cluster) -> Term:
        return kernels.collective(cluster, self.kind, self.group, self.size)

    def __str__(self) -> str:
        where = "nodes" if self.crosses else "devices"
        return f"{self.kind} of {_size(self.size)} over {self.group.members} {where}"


@dataclasses.dataclass(frozen=True)
class SmallKernels:
    """A kernel in a program, so small that it takes only its launch time."""

    count: int = 32
    number: ClassVar[None] = None
    bytes: ClassVar[int] = 4 * SIZE * SMALL**2

    def term(self, cluster: Cluster) -> Term:
        return kernels.product(cluster.accelerator, SMALL, SMALL, SMALL)

    def __str__(self) -> str:
        return "small kernel in a program"


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The host's launch of a program with one small kernel; 0 in the cost model."""

    number: ClassVar[None] = None
    bytes: ClassVar[int] = 4 * SIZE

    def term(self, cluster: Cluster) -> Term:
        return Term("", "", 0.0, WAITING)

    def __str__(self) -> str:
        return "launch of a program by the host"


def _size(size: int) -> str:
    """Bytes of a sample in a few characters, exactly."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def with_numbers(cluster: Cluster, numbers: Mapping[str, Any]) -> Cluster:
    """The cluster with some numbers of its accelerator changed."""
    return dataclasses.replace(
        cluster, accelerator=dataclasses.replace(cluster.accelerator, **numbers)
    )


# ---- the suite -----------------------------------------------------------------------------------

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PERMUTE)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices to measure.

    Args:
        devices: number on all nodes.
        node: devices per node.
        memory: usable bytes per device. 0 if unknown.
        fp8: whether it has fp8 matmuls.
    """

    devices: int
    node: int
    memory: int = 0
    fp8: bool = False

    @property
    def nodes(self) -> int:
        return self.devices // self.node


@dataclasses.dataclass(frozen=True)
class SampleSizes:
    """Sizes of samples.

    Args:
        products: (M, N, K) of each matmul.
        passes: bytes of the array of each elementwise pass.
        attention: (tokens, heads) of each attention.
        exchanges: bytes of each collective, largest first.
    """

    products: Sequence[tuple[int, int, int]]
    passes: Sequence[int]
    attention: Sequence[tuple[int, int]]
    exchanges: Sequence[int]


# A GPU takes a millisecond or more for most of these, so launches are less than one percent.
ACCELERATOR = SampleSizes(
    products=((8192, 8192, 8192), (8192, 28672, 8192), (16384, 16384, 16384), (4096, 4096, 4096)),
    passes=(2048 * MIB, 512 * MIB),
    attention=((8192, 32), (4096, 64)),
    exchanges=(256 * MIB, 64 * MIB, 16 * MIB, MIB),
)
CPU = SampleSizes(
    products=((512, 512, 512), (256, 1024, 256)),
    passes=(16 * MIB, 4 * MIB),
    attention=((256, 4),),
    exchanges=(MIB, MIB // 4),
)


def suite(machine: Machine, sizes: SampleSizes) -> list[Sample]:
    """The samples of a machine: one for each number, then a second for each, and so on.

    Samples that need more than half of a device's memory are left out.
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
    """Collectives within a node: among all its devices first, then among powers of two."""
    powers = (2**i for i in range(1, machine.node.bit_length()))
    members = {machine.node, *(n for n in powers if machine.node % n == 0)} - {1}
    for size, n, kind in itertools.product(sizes, sorted(members, reverse=True), KINDS):
        yield Exchange(kind, Group(n), size)


def _across(machine: Machine, sizes: Sequence[int]) -> Iterator[Sample]:
    """Collectives among one device of each node, each with its own network card."""
    if machine.nodes > 1:
        for size, kind in itertools.product(sizes, KINDS):
            yield Exchange(kind, Group(machine.nodes, machine.node), size, crosses=True)
