"""How the state holds a parameter that data parallel devices share: flattened, in equal parts.

A parameter's block is flattened and cut into as many equal parts as there are devices along dp x
cp, the last one padded with zeros: any shape is cut evenly.

Letters: L layers, Z devices along dp x cp, n elements of a block with the padding.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxptd.mesh import Axis
from jaxptd.params import ParamInfo

AXES = (Axis.DP, Axis.CP)  # over which the state is cut


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A parameter as the state holds it: `[L, parts]` at stages that move single layers, else flat.

    Args:
        info: as layers hold it.
        sizes: devices along each axis.
        lead: leading dims that stay: 1 where layers are moved one by one, else 0.
    """

    info: ParamInfo
    sizes: Mapping[Axis, int]
    lead: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Canonical."""
        return self.info.shape

    @property
    def decay(self) -> bool:
        return self.info.decay

    @property
    def is_canonical(self) -> bool:
        return False

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes it is cut over."""
        return self.info.axes | {*AXES}

    @cached_property
    def _cuts(self) -> list[tuple[int, ...]]:
        """Devices along each axis that a dim is cut over, of the dims that are flattened."""
        dims = self.info.axes_of_dims[self.lead :]
        return [tuple(self.sizes[Axis(axis)] for axis in axes) for axes in dims]

    @property
    def block(self) -> tuple[int, ...]:
        """What layers hold of it on one device, without the leading dim."""
        sizes = self.info.held[self.lead :]
        return tuple(n // math.prod(cut) for n, cut in zip(sizes, self._cuts, strict=True))

    @property
    def part(self) -> int:
        """The length of one part."""
        return -(-math.prod(self.block) // math.prod(self.sizes[axis] for axis in AXES))

    @property
    def padded(self) -> int:
        """The length of all parts of a block."""
        return self.part * math.prod(self.sizes[axis] for axis in AXES)

    @property
    def held(self) -> tuple[int, ...]:
        """Global, as the state holds it."""
        blocks = math.prod(math.prod(cut) for cut in self._cuts)
        return (*self.info.held[: self.lead], blocks * self.padded)

    @property
    def spec(self) -> P:
        axes = [axis for axes in self.info.axes_of_dims[self.lead :] for axis in axes]
        return P(*self.info.spec[: self.lead], (*axes, *AXES))

    def arrange(self, x: Array) -> Array:
        """All but its rows as layers hold it -> as the state holds it."""
        return self._flat(self.info.arrange(x))

    def pad(self, x: ArrayLike) -> Array:
        """Canonical -> as the state holds it."""
        return self._flat(self.info.pad(x))

    def canonical(self, x: Array) -> Array:
        """As the state holds it -> canonical."""
        return self.info.canonical(self._shaped(x))

    def _flat(self, x: Array) -> Array:
        """As layers hold it -> as the state does, global."""
        lead = self.info.held[: self.lead]
        pairs = [
            n for cut, b in zip(self._cuts, self.block, strict=True) for n in (math.prod(cut), b)
        ]
        x = x.reshape(*lead, *pairs)
        order = [*range(self.lead), *self._places(0), *self._places(1)]
        blocks = x.transpose(order).reshape(*lead, -1, math.prod(self.block))
        more = [(0, 0)] * (blocks.ndim - 1) + [(0, self.padded - blocks.shape[-1])]
        return jnp.pad(blocks, more).reshape(self.held)

    def _shaped(self, x: Array) -> Array:
        """As the state holds it -> as layers do, global."""
        lead, dims = self.info.held[: self.lead], len(self.block)
        blocks = x.reshape(*lead, -1, self.padded)[..., : math.prod(self.block)]
        x = blocks.reshape(*lead, *(math.prod(cut) for cut in self._cuts), *self.block)
        order = [place + self.lead for i in range(dims) for place in (i, dims + i)]
        return x.transpose(*range(self.lead), *order).reshape(self.info.held)

    def _places(self, second: int) -> list[int]:
        """Of blocks' numbers (0) or of what is in them (1), where both stand in turns."""
        return [self.lead + 2 * i + second for i in range(len(self.block))]

    # ---- on a device ----------------------------------------------------------------------------

    def gather(self, part: Array, dtype: DTypeLike) -> Array:
        """part[.., n/Z] -> the block, all-gathered in `dtype`. Partner: `home`."""
        flat = lax.all_gather(part.astype(dtype), AXES, axis=part.ndim - 1, tiled=True)
        return self.shaped(flat)

    def home(self, gradient: Array) -> Array:
        """The block's gradient -> its part of the sum over Z: reduce-scatter. Partner: `gather`."""
        flat = self.flat(gradient)
        return lax.psum_scatter(flat, AXES, scatter_dimension=flat.ndim - 1, tiled=True)

    def shaped(self, flat: Array) -> Array:
        """[.., padded] -> the block."""
        return flat[..., : math.prod(self.block)].reshape(*flat.shape[:-1], *self.block)

    def flat(self, block: Array) -> Array:
        """The block -> [.., padded]."""
        lead = block.shape[: block.ndim - len(self.block)]
        rows = block.reshape(*lead, -1)
        return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, self.padded - rows.shape[-1])])
