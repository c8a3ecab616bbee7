"""How the state holds a parameter that data parallel devices share: flattened, in equal parts.

A parameter's block is flattened and cut into as many equal parts as there are devices along dp x
cp, the last one padded with zeros: any shape is cut evenly.

Letters: L layers, Z devices along dp x cp, n elements of a block with the padding.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.params import ParamInfo


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
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
    def is_canonical(self) -> bool:
        return False

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes it is cut over."""
        return self.info.axes | {*BATCH_AXES}

    @cached_property
    def _cuts(self) -> list[int]:
        """Into how many blocks each dim is cut, of the dims that are flattened."""
        dims = self.info.axes_of_dims[self.lead :]
        return [math.prod(self.sizes[Axis(axis)] for axis in axes) for axes in dims]

    @property
    def block(self) -> tuple[int, ...]:
        """What layers hold of it on one device, without the leading dim."""
        sizes = self.info.held[self.lead :]
        return tuple(n // cut for n, cut in zip(sizes, self._cuts, strict=True))

    @property
    def part(self) -> int:
        """The length of one part."""
        return -(-math.prod(self.block) // math.prod(self.sizes[axis] for axis in BATCH_AXES))

    @property
    def padded(self) -> int:
        """The length of all parts of a block."""
        return self.part * math.prod(self.sizes[axis] for axis in BATCH_AXES)

    @property
    def held(self) -> tuple[int, ...]:
        """Global, as the state holds it."""
        return (*self.info.held[: self.lead], math.prod(self._cuts) * self.padded)

    @property
    def spec(self) -> P:
        axes = [axis for axes in self.info.axes_of_dims[self.lead :] for axis in axes]
        return P(*self.info.spec[: self.lead], (*axes, *BATCH_AXES))

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
        pairs = itertools.chain.from_iterable(zip(self._cuts, self.block, strict=True))
        apart = x.reshape(*lead, *pairs).transpose(self._order)
        return self.flat(apart.reshape(*lead, -1, *self.block)).reshape(self.held)

    def _shaped(self, x: Array) -> Array:
        """As the state holds it -> as layers do, global."""
        lead = self.info.held[: self.lead]
        blocks = self.shaped(x.reshape(*lead, -1, self.padded))
        apart = blocks.reshape(*lead, *self._cuts, *self.block)
        return apart.transpose(np.argsort(self._order)).reshape(self.info.held)

    @property
    def _order(self) -> list[int]:
        """[.., cut, block, cut, block] -> [.., cut, cut, block, block]."""
        end = self.lead + 2 * len(self.block)
        return [*range(self.lead), *range(self.lead, end, 2), *range(self.lead + 1, end, 2)]

    # ---- on a device ----------------------------------------------------------------------------

    def gather(self, part: Array, dtype: DTypeLike) -> Array:
        """part[.., n/Z] -> the block, all-gathered in `dtype`. Partner: `reduce_scatter`."""
        flat = lax.all_gather(part.astype(dtype), BATCH_AXES, axis=part.ndim - 1, tiled=True)
        return self.shaped(flat)

    def reduce_scatter(self, gradient: Array) -> Array:
        """The block's gradient -> its part of the sum over Z: reduce-scatter. Partner: `gather`."""
        flat = self.flat(gradient)
        return lax.psum_scatter(flat, BATCH_AXES, scatter_dimension=flat.ndim - 1, tiled=True)

    def shaped(self, flat: Array) -> Array:
        """[.., padded] -> the block."""
        return flat[..., : math.prod(self.block)].reshape(*flat.shape[:-1], *self.block)

    def flat(self, block: Array) -> Array:
        """The block -> [.., padded]."""
        lead = block.shape[: block.ndim - len(self.block)]
        rows = block.reshape(*lead, -1)
        return jnp.pad(rows, [(0, 0)] * len(lead) + [(0, self.padded - rows.shape[-1])])
