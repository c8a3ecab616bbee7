"""Normalisation over the hidden units, or over the elements of a head.

Letters: B batch, T position, D model, N heads, H head size.
"""

import dataclasses
import math
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.config import BlockOptions
from jaxptd.config.latent import EPSILON
from jaxptd.kernels.norm import LONGEST, FusedNorm
from jaxptd.layers.linear import declare
from jaxptd.layers.tensor_parallel import TensorParallel, local_numbers
from jaxptd.mesh import Axis
from jaxptd.params import ones
from jaxptd.parts.parameters import head_norm, latent_norm, norm
from jaxptd.remat import SAVED_MATMUL_IN, SAVED_MATMUL_OUT
from jaxptd.shapes import ParamShape


class Norm(nnx.Module):
    """LayerNorm, `(x - mean) / sqrt(variance + eps) * w + b` over D, or RMSNorm: no mean and no b.

    Statistics are in float32 at least. If D is sharded, each is a sum over its shards. If each
    device holds a slice of the sequence, its gradient of w and b is a partial sum. The type of x
    says so, and the partial sums are added where w is made to vary (by autodiff, or once a step).

    Args:
        size: D / each.
        options: the kind of norm, and eps.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the parameters.
        each: neighbouring elements of D that stay together when it is sharded.

    Source: Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467 (RMSNorm).
    """

    w: nnx.Param
    b: nnx.Param | None = None

    def __init__(
        self,
        size: int,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        each: int = 1,
    ) -> None:
        centred = options.norm == "layernorm"
        shapes = norm(tensor_parallel, size, 2 if centred else 1, each)
        declare(self, shapes, rngs, w=ones)
        size = size * each
        self.over = _Over.of(
            tensor_parallel.axes.hidden, size, options, tensor_parallel, centred=centred
        )
        self.fused = options.kernels == "triton" and size <= LONGEST

    def __call__(self, x_BTD: Array) -> Array:
        """x as the residual stream has it -> the same shape and type."""
        return self.beside(x_BTD, added=False)[1]

    @jax.named_scope("norm")
    def beside(self, x_BTD: Array, *, added: bool = True) -> tuple[Array, Array]:
        """x as the residual stream has it -> x, to add a layer's output to, and its norm.

        added: whether something is added to x later.
        """
        x_BTD = checkpoint_name(x_BTD, SAVED_MATMUL_IN)
        weights = [each[...] for each in (self.w, self.b) if each is not None]
        if self.fused:
            kernels = FusedNorm(self.over.eps, self.over.centred, beside=added)
            x_BTD, y_BTD = (x_BTD, *kernels(x_BTD, *weights))[-2:]
        else:
            y_BTD = _normalise(self.over, *alike(x_BTD, *weights))
        return x_BTD, checkpoint_name(y_BTD, SAVED_MATMUL_IN)


class HeadNorm(nnx.Module):
    """RMSNorm of queries or keys `[B, T, N, H]` over H, with one `w[H]` for all heads.

    The heads may be sharded. The gradient of w is then a sum over them, computed once a step.

    Args:
        size: H.
        options: eps.
        tensor_parallel: how matrices are sharded.
        rngs: random key of the parameter.
        unit: elements of H that stay together when H is sharded.

    Source: Henry et al., arXiv 2010.04245; as Qwen3 has it.
    """

    w: nnx.Param

    def __init__(
        self,
        size: int,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        unit: int = 1,
    ) -> None:
        axes = tensor_parallel.axes
        declare(self, head_norm(tensor_parallel, size, unit), rngs, w=ones)
        self.over = _Over.of(axes.head_slices, size, options, tensor_parallel, centred=False)

    def __call__(self, x_BTNH: Array) -> Array:
        """Queries or keys -> the same shape and type."""
        return _normalise(self.over, *alike(x_BTNH, self.w[...]))


class WholeNorm(nnx.Module):
    """RMSNorm of queries or keys `[B, T, N, H]` over all heads of a token, with `w[N, H]`.

    Heads, or slices of every head, are sharded as matmuls make them. Each statistic is a sum over
    the devices that share them, one all-reduce of `[B, T]` forward and one backward.

    Args:
        shape: describes w.
        options: eps.
        tensor_parallel: how matrices are sharded.
        rngs: random key of the parameter.

    Source: Muennighoff et al., arXiv 2409.02060 (OLMoE), section 4.2.
    """

    w: nnx.Param

    def __init__(
        self,
        shape: ParamShape,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        declare(self, iter([("w", shape)]), rngs, w=ones)
        axis, size = tensor_parallel.axes.inner, math.prod(shape.shape)
        self.over = _Over.of(axis, size, options, tensor_parallel, centred=False)
        self.in_slices = shape.spec[1] is not None  # of every head

    def __call__(self, x_BTNH: Array) -> Array:
        """Queries or keys -> the same shape and type."""
        x, w = x_BTNH, self.w[...]
        if self.in_slices:  # the sharded dim first, so that its padding is behind all else
            x, w = x.swapaxes(-1, -2), w.swapaxes(-1, -2)
        y = _normalise(self.over, *alike(x.reshape(*x.shape[:2], -1), w.reshape(-1)))
        y = y.reshape(x.shape)
        return y.swapaxes(-1, -2) if self.in_slices else y


class LatentNorm(nnx.Module):
    """RMSNorm of a latent vector of each token, `[B, T, R]`, with `w[R]`; every device has all R.

    Args:
        size: R.
        options: whether a loop over layers saves inputs.
        tensor_parallel: how tokens are sharded.
        rngs: random key of the parameter.

    Source: DeepSeek-V2, arXiv 2405.04434, section 3.1.2.
    """

    w: nnx.Param

    def __init__(
        self,
        size: int,
        *,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        declare(self, latent_norm(size), rngs, w=ones)
        over = _Over.of(None, size, options, tensor_parallel, centred=False)
        self.over = dataclasses.replace(over, eps=EPSILON)

    def __call__(self, x_BTR: Array) -> Array:
        """Latent vectors -> the same shape and type."""
        y_BTR = _normalise(self.over, *alike(x_BTR, self.w[...]))
        return checkpoint_name(y_BTR, SAVED_MATMUL_IN)


@dataclasses.dataclass(frozen=True)
class _Over:
    """The dim that is normalised, of D elements, and the kind of norm.

    Args:
        axis: the mesh axis that shards it, if any.
        size: D without padding.
        eps: added to the variance.
        centred: whether the mean is subtracted.
        stacked: whether backward reads x from what a loop over layers saved, without a copy.
    """

    axis: Axis | None
    size: int
    eps: float
    centred: bool
    stacked: bool

    @classmethod
    def of(
        cls,
        axis: Axis | None,
        size: int,
        options: BlockOptions,
        tensor_parallel: TensorParallel,
        *,
        centred: bool,
    ) -> Self:
        # If devices share matmuls, XLA hides fewer of their collectives without the copy.
        stacked = options.loops_keep_inputs and tensor_parallel.inner_devices == 1
        return cls(axis, size, options.norm_eps, centred, stacked)

    def mean_and_variance(self, x_BTD: Array, dtype: DTypeLike) -> tuple[Array, Array]:
        """Mean and variance over D, in `dtype`, from two sums that XLA computes in one kernel.

        The sums are about the median of three units, because the mean is not known yet. The
        variance loses digits if that median is far from the mean, as when two of the three lie
        beyond all others. It loses less than 8 D roundings.
        Source: Chan et al., Algorithms for Computing the Sample Variance, 1983.
        """
        wide_BTD, size = x_BTD.astype(dtype), x_BTD.shape[-1]
        a, b, c = (x_BTD[..., i : i + 1].astype(dtype) for i in (0, size // 2, size - 1))
        shift_BT1 = jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))
        shifted_BTD = self.pad(wide_BTD - shift_BT1)
        count = self.pad(jnp.ones(size, wide_BTD.dtype)).sum()
        sum_BT1 = shifted_BTD.sum(-1, keepdims=True)
        squares_BT1 = (shifted_BTD**2).sum(-1, keepdims=True)
        mean_BT1 = self.means(sum_BT1 + count * shift_BT1)[0]
        error_BT1 = mean_BT1 - shift_BT1
        variance_BT1 = self.means(squares_BT1 - error_BT1 * (2 * sum_BT1 - count * error_BT1))[0]
        return mean_BT1, variance_BT1

    def means(self, *sums: Array) -> list[Array]:
        """Sums over this device's D -> means over all of it, in one all-reduce."""
        sums = tuple(lax.psum(jnp.stack(sums), self.axis)) if self.axis else sums
        return [s / self.size for s in sums]

    def pad(self, x: Array) -> Array:
        """x with zeros in its padding, if it has any."""
        axis, held = self.axis, x.shape[-1]
        if axis is None or held * lax.axis_size(axis) == self.size:
            return x
        return jnp.where(local_numbers(axis, held) < self.size, x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(over: _Over, x_BTD: Array, w_D: Array, b_D: Array | None = None) -> Array:
    """Saves x for backward, which other layers save anyway, and the statistics of each token."""
    return _forward(over, x_BTD, w_D, b_D)[0]


def _forward(
    over: _Over, x_BTD: Array, w_D: Array, b_D: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    dtype, mean_BT1 = jnp.promote_types(x_BTD.dtype, jnp.float32), None
    wide_BTD = x_BTD.astype(dtype)
    if over.centred:
        mean_BT1, variance_BT1 = over.mean_and_variance(x_BTD, dtype)
        mean_BT1 = checkpoint_name(mean_BT1, SAVED_MATMUL_OUT)
        wide_BTD = over.pad(wide_BTD - mean_BT1)
    else:
        variance_BT1 = over.means((wide_BTD**2).sum(-1, keepdims=True))[0]
    scale_BT1 = checkpoint_name(lax.rsqrt(variance_BT1 + over.eps), SAVED_MATMUL_OUT)
    y_BTD = wide_BTD * scale_BT1 * w_D
    y_BTD = y_BTD if b_D is None else y_BTD + b_D
    return y_BTD.astype(x_BTD.dtype), (x_BTD, w_D, mean_BT1, scale_BT1)


def _backward(
    over: _Over, residuals: tuple[Array, Array, Array | None, Array], dy_BTD: Array
) -> tuple[Array, Array, Array | None]:
    """With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n)).

    RMSNorm leaves out mean and mean(g).
    """
    x_BTD, w_D, mean_BT1, scale_BT1 = residuals
    dtype = scale_BT1.dtype

    def wide(x_BTD: Array, dy_BTD: Array) -> tuple[Array, Array]:
        wide_BTD = x_BTD.astype(dtype)
        centred_BTD = wide_BTD if mean_BT1 is None else wide_BTD - mean_BT1
        return over.pad(centred_BTD * scale_BT1), dy_BTD.astype(dtype)

    # n and dy are computed twice, or XLA would write dy * n in float32 (`results/experiments.md`).
    # Both times behind a barrier, or XLA would compute n in forward and keep it until now. No
    # barrier on an x that a loop saved: it would force a copy.
    inputs = [
        (x_BTD, lax.optimization_barrier(dy_BTD))
        if over.stacked
        else lax.optimization_barrier((x_BTD, dy_BTD))
        for _ in range(2)
    ]
    n_BTD, dy_BTD = wide(*inputs[1])
    g_BTD = dy_BTD * w_D
    gn_BTD, total = g_BTD * n_BTD, partial(jnp.sum, axis=-1, keepdims=True)
    if over.centred:
        mean_g, mean_gn = over.means(total(g_BTD), total(gn_BTD))
        dx_BTD = g_BTD - mean_g - n_BTD * mean_gn
    else:
        dx_BTD = g_BTD - n_BTD * over.means(total(gn_BTD))[0]
    dx_BTD = over.pad(dx_BTD * scale_BT1)
    tokens = tuple(range(dy_BTD.ndim - 1))
    n_BTD, dy_BTD = wide(*inputs[0])
    dw_D = (dy_BTD * n_BTD).sum(tokens).astype(w_D.dtype)
    db_D = dy_BTD.sum(tokens).astype(w_D.dtype) if over.centred else None
    return dx_BTD.astype(x_BTD.dtype), dw_D, db_D


_normalise.defvjp(_forward, _backward)
