"""Checksums of a state on each device, to compare devices that hold copies of the same numbers.

A parameter that an axis of the mesh does not shard is held by all devices along that axis, and so
are its moments. Each of them has computed its copy from the same reduced gradients. Copies that
differ in a bit are a fault of the hardware.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_varying
from jaxptd.shapes import StoredShape
from jaxptd.step.program import Program
from jaxptd.step.state import State

BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes of a number
JOINT = " "  # between the axes in the name of a group of arrays
K = TypeVar("K")


def checksum(x: Array) -> Array:
    """The sum of an array's bits as whole numbers, uint32: one flipped bit changes it."""
    bits = lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def checksums(program: Program) -> Callable[[State], dict[str, Array]]:
    """Makes the function from a state to the checksums of its arrays, by the axes that shard them.

    The keys are the axes, the values `[devices]`, in the mesh's order, whole on every device.
    """
    states, mesh = program.states, program.mesh
    axes = tuple(mesh.axis_names)

    def body(state: State) -> dict[str, Array]:
        found: dict[str, list[Array]] = collections.defaultdict(list)

        def add(x: Array, stored: StoredShape) -> None:
            found[JOINT.join(a for a in axes if a in stored.axes)].append(checksum(x))

        states.map(add, state, lambda x: found[""].append(checksum(x)))
        sums = {key: sum(values[1:], values[0]) for key, values in found.items()}
        return {key: as_varying(x, axes).reshape(1) for key, x in sums.items()}

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(states.specs,), out_specs=P(axes), check_vma=True
    )
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))


def has_copies(program: Program) -> bool:
    """True if any parameter is held by more than one device."""
    axes = {axis for axis, size in program.mesh.shape.items() if size > 1}
    return any(axes - stored.axes for stored in program.states.stored.values())


@dataclasses.dataclass(frozen=True)
class Difference:
    """Devices whose copies differ from the others.

    Args:
        odd: the devices in the minority; all of them where there is none.
        copies: number of devices that should hold the same.
    """

    odd: tuple[Any, ...]
    copies: int

    @property
    def is_clear(self) -> bool:
        """True if most copies agree, so that the odd ones are wrong."""
        return 2 * len(self.odd) < self.copies

    def __str__(self) -> str:
        names = " and ".join(f"device {x.id} of process {x.process_index}" for x in self.odd)
        if self.is_clear:
            return f"{names}, unlike {self.copies - len(self.odd)} others with the same copy"
        return f"{names}, one of which is wrong"


def unlike(values: Mapping[K, Hashable]) -> tuple[K, ...]:
    """The keys whose values differ from that of most; all keys if no value is that of most.

    >>> unlike({"a": 1, "b": 2, "c": 1}), unlike({"a": 1, "b": 2}), unlike({"a": 1, "b": 1})
    (('b',), ('a', 'b'), ())
    """
    (usual, number), *others = collections.Counter(values.values()).most_common()
    if not others:
        return ()
    return tuple(key for key, x in values.items() if x != usual or 2 * number <= len(values))


def difference(sums: Mapping[str, np.ndarray], mesh: Mesh) -> Difference | None:
    """The first group of devices whose copies differ; None if all copies are alike.

    Args:
        sums: as `checksums` gives them.
        mesh: of the program.
    """
    axes, places = list(mesh.axis_names), np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    for key, values in sums.items():
        sharded = [axes.index(axis) for axis in key.split()]
        copied = [index for index in range(len(axes)) if index not in sharded]
        copies = int(np.prod([mesh.devices.shape[index] for index in copied]))
        for group in places.transpose(*sharded, *copied).reshape(-1, copies):
            if odd := unlike({place: int(values[place]) for place in group}):
                return Difference(tuple(mesh.devices.flat[place] for place in odd), copies)
    return None
