"""Attention in windows of an image, and strips of images that devices share.

Every second block shifts its windows by half a window.

Letters: B images, R rows, Q columns, C hidden units, W windows of an image, T patches of a window,
N heads, H head size. For strips, B counts the images of all devices that share them.
Source: Liu et al., Swin Transformer, arXiv 2103.14030, section 3.2.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd import collectives
from jaxptd.config import ModelConfig
from jaxptd.layers.attention.heads import Heads
from jaxptd.layers.dropout import TokenInfo, keep_mask
from jaxptd.layers.linear import INIT
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.mesh import SAMPLE_AXES, Axis
from jaxptd.params import Initialiser, param
from jaxptd.parts.parameters import HeadShape, by_head
from jaxptd.remat import SAVED_ATTENTION_OUT, SAVED_MATMUL_IN
from jaxptd.vision.architecture import WindowShape

# ---- strips: each device holds some rows of all images, or its share of whole ones ---------------

# Strips consist of whole windows, so work inside a window or a patch needs no other device. Levels
# whose rows do not split this way use whole images, if the images split over the devices.


@dataclasses.dataclass(frozen=True)
class Strips:
    """The devices that share images, and how they share them.

    Args:
        axis: the devices' axis.
        others: axes that share a micro-batch's images before this one.
    """

    axis: Axis
    others: tuple[Axis, ...]

    @classmethod
    def of(cls, tensor_parallel: TensorParallel) -> Self:
        """Makes strips along cp, of the images that devices along `axes.tokens` hold."""
        return cls(Axis.CP, tensor_parallel.axes.tokens)

    @property
    def devices(self) -> int:
        """The number of devices, C."""
        return lax.axis_size(self.axis)

    # ---- from strips to whole images and back ----

    def as_whole(self, x_BRQ: Array) -> Array:
        """x[B, R/C, Q, ..] -> x[B/C, R, Q, ..] if in strips; all-to-all, also in backward.

        Partner: `as_strips`.
        """
        if is_whole(x_BRQ):
            return x_BRQ
        return lax.all_to_all(x_BRQ, self.axis, split_axis=0, concat_axis=1, tiled=True)

    def as_strips(self, x_BRQ: Array, rows: int) -> Array:
        """x[B/C, R, Q, ..] -> x[B, R/C, Q, ..], R = `rows`. Partner: `as_whole`."""
        if x_BRQ.shape[1] == rows:
            return x_BRQ
        return lax.all_to_all(x_BRQ, self.axis, split_axis=1, concat_axis=0, tiled=True)

    def token_info(self, x_BRQ: Array, token_info: TokenInfo) -> TokenInfo:
        """The places of x: unchanged for strips, otherwise those of its whole images.

        Args:
            x_BRQ: this device's.
            token_info: samples of all images of the micro-batch, and pixel rows of a strip.
        """
        if not is_whole(x_BRQ):
            return token_info
        shares = math.prod(map(lax.axis_size, self.others))
        rows = token_info.position_T.shape[0] * self.devices
        sample_B = token_info.sample_B.reshape(shares, self.devices, -1)
        own_B = lax.dynamic_index_in_dim(sample_B, lax.axis_index(self.axis), 1).reshape(-1)
        return token_info._replace(sample_B=own_B, position_T=jnp.arange(rows, dtype=jnp.int32))

    # ---- rows of other devices ----

    def rolled(self, x_BRQ: Array, by: int) -> Array:
        """Rolls x down: the last rows move to the top; strips send `by` rows to the next device."""
        if is_whole(x_BRQ):
            return jnp.roll(x_BRQ, by, 1)
        cut = x_BRQ.shape[1] - by if by > 0 else -by
        first, last = x_BRQ[:, :cut], x_BRQ[:, cut:]
        if by > 0:
            both = collectives.shift(last, self.axis), first
        else:
            both = last, collectives.shift(first, self.axis, -1)
        return jnp.concatenate(both, 1)

    def gathered(self, x_BRQ: Array) -> Array:
        """x[B, R/C, Q] -> x[B, R, Q]."""
        return collectives.all_gather(x_BRQ, self.axis, 1)

    # ---- values of images ----

    def summed(self, x: Array) -> Array:
        """Sums over strips -> sums over images, on all devices."""
        return lax.psum(collectives.as_varying(x, [self.axis]), self.axis)

    def summed_batch(self, x: Array) -> Array:
        """Sums over this device's strips or images -> sums over the batch, on all devices."""
        axes = (*SAMPLE_AXES, self.axis, *self.others)
        return lax.psum(collectives.as_varying(x, axes), axes)

    def mean(self, x_BRQ: Array) -> Array:
        """x -> the mean of each image, `[B, ..]`, in float32 or wider, on all devices."""
        mean_B = x_BRQ.mean((1, 2), dtype=jnp.promote_types(x_BRQ.dtype, jnp.float32))
        if is_whole(x_BRQ):
            return collectives.all_gather(mean_B, self.axis, 0)
        return self.summed(mean_B) / self.devices

    def once(self, x: Array) -> Array:
        """x on the first device, zeros on the others, so that a sum counts a shared value once."""
        return jnp.where(lax.axis_index(self.axis) == 0, x, jnp.zeros_like(x))


def is_whole(x_BRQ: Array) -> bool:
    """True if x holds whole images, which are square, not strips."""
    return x_BRQ.shape[1] == x_BRQ.shape[2]


# ---- windows of a level, and attention in them ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a level.

    Args:
        rows: of patches in an image, and patches in a row.
        size: patches in a row of a window.
        shift: patches by which the windows of every second block are moved down and right.
    """

    rows: int
    size: int
    shift: int

    def split(self, x_BRQ: Array) -> Array:
        """x[B, R, Q, ..] -> x[B, W, T, ..]."""
        B, rows, cols, *rest = x_BRQ.shape
        x = x_BRQ.reshape(B, rows // self.size, self.size, cols // self.size, self.size, *rest)
        return jnp.swapaxes(x, 2, 3).reshape(B, -1, self.size**2, *rest)

    def join(self, x_BWT: Array) -> Array:
        """x[B, W, T, ..] -> x[B, R, Q, ..]. Undoes `split`."""
        B, _, _, *rest = x_BWT.shape
        x = x_BWT.reshape(B, -1, self.rows // self.size, self.size, self.size, *rest)
        return jnp.swapaxes(x, 2, 3).reshape(B, -1, self.rows, *rest)

    def numbers(self, row_R: Array) -> Array:
        """The index of each patch in the image, int32[W, T]; row_R: global indices of rows."""
        number_RQ = row_R[:, None] * self.rows + jnp.arange(self.rows, dtype=jnp.int32)
        return self.split(number_RQ[None])[0]

    def seen(self, row_R: Array) -> Array:
        """The patches of a shifted window that each of its patches sees, bool[W, T, T].

        A shifted image is rolled, so windows at its end also contain patches from its beginning.
        """
        region_RQ = 3 * self._region(row_R)[:, None] + self._region(jnp.arange(self.rows))
        region_WT = self.split(region_RQ[None])[0]
        return region_WT[:, :, None] == region_WT[:, None, :]

    def _region(self, number: Array) -> Array:
        """0, 1 or 2, different for rows or columns of different windows before the shift."""
        in_last, rolled = number >= self.rows - self.size, number >= self.rows - self.shift
        return in_last.astype(jnp.int32) + (rolled & in_last)

    @property
    def offsets(self) -> np.ndarray:
        """The index of a key's place relative to a query's, int32[T, T], below (2 size - 1)**2."""
        row_T, col_T = np.divmod(np.arange(self.size**2), self.size)
        down, right = (each[:, None] - each[None, :] + self.size - 1 for each in (row_T, col_T))
        return (down * (2 * self.size - 1) + right).astype(np.int32)


class WindowBias(nnx.Module):
    """A table `[(2 size - 1)**2, N]` of biases by relative place of a key, sharded like heads.

    Args:
        config: the level's, with its heads.
        windows: the level's.
        tensor_parallel: how heads are sharded.
        rngs: random key for the initial table.
    """

    def __init__(
        self,
        config: ModelConfig,
        windows: Windows,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        heads = HeadShape(config.num_heads, config.num_heads, config.block.head_size)
        rows = (2 * windows.size - 1) ** 2
        self.table = param(rngs(), by_head(tensor_parallel, rows, heads), INIT)
        self.windows = windows

    def __call__(self) -> Array:
        """The bias of each score of a window, `[N, T, T]`."""
        return jnp.moveaxis(self.table[...][self.windows.offsets], -1, 0)


class WindowAttention(Heads):
    """Multi-head attention in the windows of a level; Q, K and V come from one matmul.

    Each device holds whole images, or strips of whole windows, and its own heads: windows need no
    other device. With a slice of every head, scores are summed over devices.

    Args:
        shape: its projections and windows, the level's shifted ones.
        config: the level's, with the kernel's scale and dropout.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial parameters.
        init_out: initialiser of the output projection.
    """

    def __init__(
        self,
        shape: WindowShape,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        super().__init__(
            shape, config, tensor_parallel=tensor_parallel, rngs=rngs, init_out=init_out
        )
        windows = Windows(shape.rows, shape.window, shape.shift)
        self.window_bias = WindowBias(config, windows, tensor_parallel=tensor_parallel, rngs=rngs)
        self.windows = windows

    @jax.named_scope("attention")
    def __call__(self, x_BRQC: Array, token_info: TokenInfo, *, shift: int) -> Array:
        """Maps the residual stream to attention's output, sharded alike.

        Args:
            x_BRQC: whole images of this device, or strips of whole windows.
            token_info: samples of all images that the devices of a matmul share, rows of this
                device, and the seed for dropout of probabilities.
            shift: the windows' shift.
        """
        assert self.qkv is not None
        x = checkpoint_name(self._rolled(x_BRQC, -shift), SAVED_MATMUL_IN)
        qkv = self.qkv(x.reshape(1, -1, x.shape[-1]))
        qkv = self.windows.split(qkv.reshape(-1, *x.shape[1:3], *qkv.shape[2:]))
        q, k, v = jnp.moveaxis(qkv, 3, 0)
        coordinates = _Sites(
            self.windows.seen(token_info.position_T) if shift else None,
            self.windows.numbers(token_info.position_T),
            self._seed(token_info, q.shape[3]),
        )
        o = self._core(q, k, v, self.window_bias(), coordinates)
        o = self.windows.join(checkpoint_name(o, SAVED_ATTENTION_OUT))
        y = self.out(o.reshape(1, -1, *o.shape[3:])).reshape(x.shape)
        return self._rolled(y, shift)

    def _rolled(self, x_BRQC: Array, by: int) -> Array:
        """Rolls x down and right."""
        return Strips.of(self.tensor_parallel).rolled(jnp.roll(x_BRQC, by, 2), by) if by else x_BRQC

    def _seed(self, token_info: TokenInfo, heads: int) -> Array | None:
        """Dropout seeds `[B, N, 2]` of the images between the matmuls."""
        if token_info.seed is None:
            return None
        local = token_info._replace(
            sample_B=self.tensor_parallel.axes.logit_images(token_info.sample_B)
        )
        return self.seed(local, heads)

    def _core(self, q: Array, k: Array, v: Array, bias_NTT: Array, coordinates: "_Sites") -> Array:
        """q, k, v[B, W, T, N, H] -> [B, W, T, N, H]; backward recomputes scores."""
        config = self.config
        attend = partial(
            _attend,
            scale=config.block.attention_scale,
            rate=config.dropout,
            whole=self.tensor_parallel.axes.sum_over_head,
        )
        return jax.checkpoint(attend)(q, k, v, bias_NTT, coordinates)


class _Sites(NamedTuple):
    """Patches `seen` [W, T, T], None for all; patch `number`s, int32[W, T]; `seed`s [B, N, 2]."""

    seen_WTT: Array | None
    number_WT: Array
    seed_BN2: Array | None


def _attend(q, k, v, bias_NTT, coordinates, *, scale, rate, whole):  # type: ignore[no-untyped-def]
    """Softmax of scaled and biased scores, times the values.

    whole: sums scores over the slices of a head.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = jnp.einsum("BWTNH,BWSNH->BWNTS", q, k, preferred_element_type=wide)
    s = whole(s) * scale + bias_NTT.astype(wide)
    if coordinates.seen_WTT is not None:
        s = jnp.where(coordinates.seen_WTT[:, None], s, -jnp.inf)
    # Flattened: with fewer dims XLA searches fewer tilings, so it compiles faster with less memory.
    p = jax.nn.softmax(s.reshape(-1, *s.shape[3:]), axis=-1).reshape(s.shape)
    if coordinates.seed_BN2 is not None and rate:
        seed = coordinates.seed_BN2[:, None, :, None, None]
        query, key = (
            coordinates.number_WT[:, None, :, None],
            coordinates.number_WT[:, None, None, :],
        )
        p = jnp.where(keep_mask(seed, query, key, rate), p / (1 - rate), 0)
    o = jnp.einsum("BWNTS,BWSNH->BWTNH", p.astype(q.dtype), v, preferred_element_type=wide)
    return o.astype(q.dtype)
