"""A ring: which part of a sequence each of its devices holds, and how parts travel round it.

*Contiguous* (`blockwise`, `rsa`): device i of n holds part i of n. A causal query sees nothing of
the parts after its own, so the last device has 2n-1 times the work of the first.
*Zigzag*: device i holds chunks i and 2n-1-i of 2n. Of any two devices' four pairs of chunks, two
are seen whole and two not at all, whichever device comes first: the same work on every device.

n devices: n-1 hops, and n-1 more for a gradient that travels with its part, from the first other
device that sees the part until it is home. None of them is wasted. Each of them, but the first of
`travel_back`, is under way while a part is visited, if the own part is visited before `travel` and
after `travel_back`.

Letters: B batch, T own query, S own key, C devices of the ring.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxptd.attention.kernel import Sites
from jaxptd.collectives import Axes, shift
from jaxptd.mesh import RingKind


class Tokens(NamedTuple):
    """What attention must know of the tokens, beside where they are.

    segment_BCT: the document of each token of every device's part, as `flash.Sites` has it, or
    None. seed_BN2: of dropout, or None.
    """

    segment_BCT: Array | None = None
    seed_BN2: Array | None = None


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along a mesh axis or several, and which part of a sequence each of them holds."""

    axis: Axes
    kind: RingKind = "zigzag"

    def shift(self, x: Array) -> Array:
        """x -> what the device before this one has."""
        return shift(x, self.axis)

    def order(self, length: int, devices: int) -> np.ndarray:
        """Positions `[length]` of a sequence's tokens in the order in which the devices hold them.

        Raises:
            ValueError: a zigzag's part has an odd number of tokens.
        """
        parts = [self._part(length // devices, i, devices) for i in range(devices)]
        return np.concatenate([start + np.arange(n) for part in parts for start, n in part])

    def positions(self, length: int, device: Array | None = None) -> Array:
        """Positions of the `length` tokens that a device (default: this one) holds, int32."""
        device = lax.axis_index(self.axis) if device is None else device
        part = self._part(length, device, lax.axis_size(self.axis))
        return jnp.concatenate([start + jnp.arange(n, dtype=jnp.int32) for start, n in part])

    def positions_along(self, axis: str, length: int) -> Array:
        """Positions of `length` tokens of this device's block along `axis`, the ring's first.

        Its other axes cut the block further.
        """
        inner = lax.axis_size(self.axis) // lax.axis_size(axis)
        devices = [lax.axis_index(axis) * inner + i for i in range(inner)]
        return jnp.concatenate([self.positions(length // inner, i) for i in devices])

    def parts(self, x_BCT: Array) -> Array:
        """What was gathered along the first axis -> a part for each of the ring's devices."""
        return x_BCT.reshape(x_BCT.shape[0], lax.axis_size(self.axis), -1)

    def _part(self, length: int, device: Any, devices: int) -> list[tuple[Any, int]]:
        """First position and length of each chunk of `device`'s part."""
        if self.kind != "zigzag":
            return [(device * length, length)]
        if length % 2 and devices > 1:
            raise ValueError(f"a part of {length} tokens does not split into a zigzag's two chunks")
        half = length // 2
        return [(device * half, half), ((2 * devices - 1 - device) * half, length - half)]

    def sites(self, tokens: Tokens, length: int, source: Array) -> Sites:
        """Of this device's queries and the keys of device `source`; `length` tokens each."""
        query_BT = key_BS = None
        if tokens.segment_BCT is not None:
            query_BT, key_BS = (
                lax.dynamic_index_in_dim(tokens.segment_BCT, device, 1, keepdims=False)
                for device in (lax.axis_index(self.axis), source)
            )
        query_T, key_S = self.positions(length), self.positions(length, source)
        return Sites(query_T, key_S, query_BT, key_BS, tokens.seed_BN2)

    def all_sites(self, tokens: Tokens, length: int) -> Sites:
        """Of this device's queries and the keys of all devices, one device after the other."""
        size = lax.axis_size(self.axis)
        key_S = jnp.asarray(self.order(length * size, size), jnp.int32)
        segment = tokens.segment_BCT
        every = None if segment is None else segment.reshape(segment.shape[0], -1)
        own = self.sites(tokens, length, lax.axis_index(self.axis))
        return own._replace(key_S=key_S, key_segment_BS=every)


def travel(x: Array, ring: Ring, total: Any, visit: Callable[[Any, Array, Array], Any]) -> Any:
    """`total` after `visit(total, x of another device, its number)` for each of the others.

    A hop is under way while the part before it is visited. A loop, so that one visit is over before
    the next begins and its memory is used again.
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    if size == 1:
        return total

    def go(carry: tuple[Array, Any], step: Array) -> tuple[tuple[Array, Any], None]:
        x, total = carry
        return (ring.shift(x), visit(total, x, (me - step) % size)), None

    (x, total), _ = lax.scan(go, (ring.shift(x), total), jnp.arange(1, size - 1))
    return visit(total, x, (me + 1) % size)


def travel_back(
    x: Array, ring: Ring, total: Any, visit: Callable[[Any, Array, Array], tuple[Any, Array]]
) -> tuple[Any, Array | int]:
    """As `travel`, where `visit` also gives a gradient of x: its sum comes home to x's device.

    Barriers: no hop leaves before the visit over which the one before it lay is done. Else XLA for
    GPUs puts two visits over one hop, and none over another.
    """
    me, size = lax.axis_index(ring.axis), lax.axis_size(ring.axis)
    if size == 1:
        return total, 0
    x, total = lax.optimization_barrier((ring.shift(x), total))
    ahead = ring.shift(x) if size > 2 else x
    total, dx = visit(total, x, (me - 1) % size)

    def go(carry: tuple[Array, Array, Any], step: Array) -> tuple[tuple[Array, Array, Any], None]:
        x, dx, total = lax.optimization_barrier(carry)
        ahead, dx = ring.shift(x), ring.shift(dx)
        total, part = visit(total, x, (me - step) % size)
        return (ahead, dx + part, total), None

    carry, _ = lax.scan(go, (ahead, dx, total), jnp.arange(2, size - 1))
    x, dx, total = lax.optimization_barrier(carry)
    if size > 2:
        dx = ring.shift(dx)
        total, part = visit(total, x, (me + 1) % size)
        dx += part
    return total, ring.shift(dx)
