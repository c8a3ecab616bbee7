"""Images as patches, and levels of coarser and finer patches.

Where four patches become one, or one becomes several, the elements of each hidden unit's patches
are neighbours: (c, q), q innermost. So a device's block of the C hidden units is also its block of
the C q elements, and no level needs another device's.

Letters: B images, R rows, Q columns, C hidden units, q joined patches, K classes.
Source: Liu et al., arXiv 2103.14030, section 3.1; Cao et al., Swin-Unet, arXiv 2105.05537.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.config import BlockOptions, Images
from jaxptd.layers.linear import INIT
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel, add_bias, matmul
from jaxptd.params import param, zeros
from jaxptd.parts.parameters import vector
from jaxptd.shapes import ParamShape


def joined(x_BRQ: Array, side: int) -> Array:
    """x[B, R, Q, ..] -> x[B, R / side, Q / side, .., side**2]: patches of side x side."""
    B, rows, cols, *rest = x_BRQ.shape
    x = x_BRQ.reshape(B, rows // side, side, cols // side, side, *rest)
    x = jnp.moveaxis(x, (2, 4), (-2, -1))
    return x.reshape(B, rows // side, cols // side, *rest, side**2)


def parted(x_BRQ: Array, side: int) -> Array:
    """x[B, R, Q, .., side**2] -> x[B, R side, Q side, ..]. Undoes `joined`."""
    B, rows, cols, *rest, _ = x_BRQ.shape
    x = x_BRQ.reshape(B, rows, cols, *rest, side, side)
    x = jnp.moveaxis(x, (-2, -1), (2, 4))
    return x.reshape(B, rows * side, cols * side, *rest)


class PatchEmbedding(nnx.Module):
    """A matmul for each patch, `w[channels, side, side, C]`, and a norm.

    Pixels are in the batch, so each device embeds the images of its own residual stream.

    Args:
        images: sizes of images and patches.
        size: C.
        options: of the norm.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial weight.
    """

    def __init__(
        self,
        images: Images,
        size: int,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        pixels = images.channels, images.patch, images.patch
        hidden, axis = (tensor_parallel.padded_hidden(size),), tensor_parallel.axes.hidden_spec()
        shape = ParamShape(
            (*pixels, size),
            (*pixels, *hidden),
            (None, None, None, *axis),
            decay=True,
            cast=True,
            matrix="rrrc",
        )
        self.w = param(rngs(), shape, INIT)
        self.b = param(rngs(), vector((size,), axis, hidden), zeros)
        self.norm = Norm(size, options=options, tensor_parallel=tensor_parallel, rngs=rngs)
        self.side, self.tensor_parallel = images.patch, tensor_parallel

    def __call__(self, image_BYXS: Array, dtype: DTypeLike) -> Array:
        """Images[B, rows, columns, channels] of all devices -> x, the residual stream."""
        local = self.tensor_parallel.axes.local_images(image_BYXS).astype(dtype)
        patch_BRQP = joined(local, self.side)
        patch_BRQP = patch_BRQP.reshape(*patch_BRQP.shape[:3], -1)
        w = self.w[...]
        x_BRQC = matmul(patch_BRQP, w.reshape(-1, w.shape[-1]), 1)
        return self.norm(add_bias(*alike(x_BRQC, self.b[...])))


class PatchProduct(nnx.Module):
    """A matmul of the residual stream, `w[C, q, C']` or `w[C, C', q]`; the result is sharded alike.

    Args:
        size: C.
        out: C'.
        before: number q of patches that become one.
        after: number q of patches that one becomes.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial weight.
        bias: whether a bias `[C']` is added; false where one patch becomes several.
    """

    def __init__(
        self,
        size: int,
        out: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        before: int = 1,
        after: int = 1,
        bias: bool = False,
    ) -> None:
        q = (before,) * (before > 1), (after,) * (after > 1)
        contraction, hidden = tensor_parallel.axes.square_spec()
        sizes = tensor_parallel.padded_hidden(size), tensor_parallel.padded_hidden(out)
        shape = ParamShape(
            (size, *q[0], out, *q[1]),
            (sizes[0], *q[0], sizes[1], *q[1]),
            (contraction, *[None] * len(q[0]), hidden, *[None] * len(q[1])),
            decay=True,
            cast=True,
            matrix="r" * (1 + len(q[0])) + "c" * (1 + len(q[1])),
        )
        self.w = param(rngs(), shape, INIT)
        biases = vector((out,), tensor_parallel.axes.hidden_spec(), sizes[1:])
        self.b = param(rngs(), biases, zeros) if bias else None
        self.tensor_parallel, self.before, self.after = tensor_parallel, before, after

    def __call__(self, x: Array) -> Array:
        """x[B, R, Q, C q] -> x[B, R, Q, C' q]."""
        w = self.w[...]
        flat = x.reshape(1, -1, x.shape[-1])
        y = self.tensor_parallel.square(flat, w.reshape(w.shape[0] * self.before, -1))
        y = y if self.b is None else add_bias(y, self.b[...])
        return y.reshape(*x.shape[:-1], -1)


class PatchMerging(nnx.Module):
    """Joins 2 x 2 patches of size C to one of size 2 C, by a norm of the 4 C and a matmul."""

    def __init__(
        self, size: int, *, options: BlockOptions, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        self.norm = Norm(size, options=options, tensor_parallel=tensor_parallel, rngs=rngs, each=4)
        self.linear = PatchProduct(
            size, 2 * size, before=4, tensor_parallel=tensor_parallel, rngs=rngs
        )

    def __call__(self, x_BRQC: Array) -> Array:
        """x[B, R, Q, C] -> x[B, R / 2, Q / 2, 2 C]."""
        x = joined(x_BRQC, 2)
        return self.linear(self.norm(x.reshape(*x.shape[:3], -1)))


class PatchExpanding(nnx.Module):
    """Splits each patch of size C into side x side patches of size C', by a matmul and a norm.

    Args:
        size: C.
        out: C'.
        side: patches per row that a patch becomes.
        options: of the norm.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial weight.
    """

    def __init__(
        self,
        size: int,
        out: int,
        side: int,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        self.linear = PatchProduct(
            size, out, after=side**2, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.norm = Norm(out, options=options, tensor_parallel=tensor_parallel, rngs=rngs)
        self.side = side

    def __call__(self, x_BRQC: Array) -> Array:
        """x[B, R, Q, C] -> x[B, R side, Q side, C']."""
        y = self.linear(x_BRQC)
        return self.norm(parted(y.reshape(*y.shape[:3], -1, self.side**2), self.side))


class SkipConnection(nnx.Module):
    """Joins x with the same level's x on the way down, by a matmul `w[C, 2, C]` and a bias."""

    def __init__(self, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs) -> None:
        self.linear = PatchProduct(
            size, size, before=2, bias=True, tensor_parallel=tensor_parallel, rngs=rngs
        )

    def __call__(self, x_BRQC: Array, skip_BRQC: Array) -> Array:
        """x and the other residual stream -> x, all sharded alike."""
        both = jnp.stack([x_BRQC, skip_BRQC], -1)
        return self.linear(both.reshape(*both.shape[:3], -1))


class Classes(nnx.Module):
    """Logits of K classes, `w[C, K]`; so few that each device holds all for its own patches.

    Args:
        size: C.
        classes: K.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial weight.
        bias: whether a bias `[K]` is added.
    """

    def __init__(
        self,
        size: int,
        classes: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        bias: bool,
    ) -> None:
        hidden = tensor_parallel.padded_hidden(size)
        spec = (*tensor_parallel.axes.hidden_spec(), None)
        shape = ParamShape((size, classes), (hidden, classes), spec, decay=True, matrix="rc")
        self.w = param(rngs(), shape, INIT)
        biases = vector((classes,), (None,), (classes,))
        self.b = param(rngs(), biases, zeros) if bias else None
        self.tensor_parallel = tensor_parallel

    def __call__(self, x_BC: Array) -> Array:
        """x[.., C] -> logits[.., K], in float32 or wider."""
        wide = x_BC.astype(jnp.promote_types(x_BC.dtype, jnp.float32))
        logits = self.tensor_parallel.axes.sum_over_hidden(matmul(wide, self.w[...], 1))
        return logits if self.b is None else add_bias(*alike(logits, self.b[...]))
