"""Images that several devices share: each has a strip of rows of all, or as many whole ones.

Strips are of whole windows, so what is inside a window, or a patch, needs no other device. Levels
whose rows do not split so have whole images, if the images split over the devices.

Letters: B images of these devices, C devices, R rows, Q columns.
"""

import dataclasses
import math
from typing import Self

import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import all_gather, as_varying, shift
from jaxptd.layers.dropout import Places
from jaxptd.layers.form import TensorParallel
from jaxptd.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Strips:
    """The devices that share images, and the ways in which they do.

    Args:
        axis: of the devices.
        others: axes that share the images of a micro-batch before these do.
    """

    axis: Axis
    others: tuple[Axis, ...]

    @classmethod
    def of(cls, form: TensorParallel) -> Self:
        """Makes those along cp, which share what devices along `axes.tokens` have of the images."""
        return cls(Axis.CP, form.axes.tokens)

    @property
    def devices(self) -> int:
        """The number of devices, C."""
        return lax.axis_size(self.axis)

    # ---- from strips to whole images and back ----

    def as_whole(self, x_BRQ: Array) -> Array:
        """x[B, R/C, Q, ..] -> x[B/C, R, Q, ..], if it is not so yet: all-to-all, and backward one.

        Partner: `as_strips`.
        """
        if is_whole(x_BRQ):
            return x_BRQ
        return lax.all_to_all(x_BRQ, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def as_strips(self, x_BRQ: Array, rows: int) -> Array:
        """x[B/C, R, Q, ..] -> x[B, R/C, Q, ..] with so many rows. Partner: `as_whole`."""
        if x_BRQ.shape[1] == rows:
            return x_BRQ
        return lax.all_to_all(x_BRQ, self.axis, split_axis=1, concat_axis=0, tiled=True)

    def places(self, x_BRQ: Array, places: Places) -> Places:
        """The places of x: as they are for strips, else those of its whole images.

        Args:
            x_BRQ: of this device.
            places: samples of all images of the micro-batch, and pixel rows of a strip.
        """
        if not is_whole(x_BRQ):
            return places
        shares = math.prod(map(lax.axis_size, self.others))
        rows = places.position_T.shape[0] * self.devices
        sample_B = places.sample_B.reshape(shares, self.devices, -1)
        own_B = lax.dynamic_index_in_dim(sample_B, lax.axis_index(self.axis), 1).reshape(-1)
        return places._replace(sample_B=own_B, position_T=jnp.arange(rows, dtype=jnp.int32))

    # ---- rows of other devices ----

    def rolled(self, x_BRQ: Array, by: int) -> Array:
        """x moved down, and the last rows to the top: strips send `by` rows to the next device."""
        if is_whole(x_BRQ):
            return jnp.roll(x_BRQ, by, 1)
        cut = x_BRQ.shape[1] - by if by > 0 else -by
        first, last = x_BRQ[:, :cut], x_BRQ[:, cut:]
        both = (shift(last, self.axis), first) if by > 0 else (last, shift(first, self.axis, -1))
        return jnp.concatenate(both, 1)

    def gathered(self, x_BRQ: Array) -> Array:
        """x[B, R/C, Q] -> x[B, R, Q]."""
        return all_gather(x_BRQ, self.axis, 1)

    # ---- values of images ----

    def summed(self, x: Array) -> Array:
        """Sums of strips -> sums of images, which all devices have."""
        return lax.psum(as_varying(x, [self.axis]), self.axis)

    def summed_batch(self, x: Array) -> Array:
        """Sums of this device's strips, or images -> sums of the batch, which all devices have."""
        axes = (Axis.DP, self.axis, *self.others)
        return lax.psum(as_varying(x, axes), axes)

    def mean(self, x_BRQ: Array) -> Array:
        """x -> the mean of each image, `[B, ..]`, float32 at least: all devices have all."""
        mean_B = x_BRQ.mean((1, 2), dtype=jnp.promote_types(x_BRQ.dtype, jnp.float32))
        if is_whole(x_BRQ):
            return all_gather(mean_B, self.axis, 0)
        return self.summed(mean_B) / self.devices

    def once(self, x: Array) -> Array:
        """x on the first device, zeros on the others: what all have counts once in a sum."""
        return jnp.where(lax.axis_index(self.axis) == 0, x, jnp.zeros_like(x))


def is_whole(x_BRQ: Array) -> bool:
    """True if x has whole images, which are square, not strips of them."""
    return x_BRQ.shape[1] == x_BRQ.shape[2]
