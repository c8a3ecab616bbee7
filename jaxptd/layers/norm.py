"""Layer normalisation. Letters: B batch, T position, D model."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import KEPT, TAKEN
from jaxptd.collectives import alike
from jaxptd.layers.axes import ShardingAxes
from jaxptd.layers.form import TensorParallel
from jaxptd.params import ones, param, zeros

EPSILON = 1e-5  # GPT-2's


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + 1e-5) * w + b` over D; statistics in float32 at least.

    Where D is sharded, each statistic is a sum over its shards. Where each device holds a slice of
    the sequence, its gradient of w and b is a partial sum: the type of x says so, and the partial
    sums are added where w is made to vary (by autodiff, or once a step).

    Source: Ba et al., arXiv 1607.06450.
    """

    def __init__(self, size: int, *, form: TensorParallel, rngs: nnx.Rngs) -> None:
        padded = (form.padded_hidden(size),)
        spec = form.axes.hidden_spec()
        self.w = param(rngs(), (size,), ones, spec=spec, padded=padded, decay=False)
        self.b = param(rngs(), (size,), zeros, spec=spec, padded=padded, decay=False)
        self.size, self.axes = size, form.axes

    @jax.named_scope("norm")
    def __call__(self, x_BTD: Array) -> Array:
        """x as the residual stream has it -> the same shape and type."""
        x_BTD, w_D, b_D = alike(checkpoint_name(x_BTD, TAKEN), self.w[...], self.b[...])
        return checkpoint_name(_normalise(x_BTD, w_D, b_D, self.axes, self.size), TAKEN)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalise(x_BTD: Array, w_D: Array, b_D: Array, axes: ShardingAxes, size: int) -> Array:
    """Saves x for backward, which others save anyway, and two statistics of each token."""
    return _forward(x_BTD, w_D, b_D, axes, size)[0]


def _forward(
    x_BTD: Array, w_D: Array, b_D: Array, axes: ShardingAxes, size: int
) -> tuple[Array, tuple[Array, ...]]:
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    mean_BT1 = checkpoint_name(_means(axes, size, wide_BTD)[0], KEPT)
    centred_BTD = axes.zero_hidden_padding(wide_BTD - mean_BT1, size)
    variance_BT1 = _means(axes, size, centred_BTD**2)[0]
    scale_BT1 = checkpoint_name(lax.rsqrt(variance_BT1 + EPSILON), KEPT)
    y_BTD = (centred_BTD * scale_BT1 * w_D + b_D).astype(x_BTD.dtype)
    return y_BTD, (x_BTD, w_D, mean_BT1, scale_BT1)


def _backward(
    axes: ShardingAxes, size: int, residuals: tuple[Array, ...], dy_BTD: Array
) -> tuple[Array, Array, Array]:
    """With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n))."""
    x_BTD, w_D, mean_BT1, scale_BT1 = residuals

    def wide(x_BTD: Array, dy_BTD: Array) -> tuple[Array, Array]:
        n_BTD = axes.zero_hidden_padding(
            (x_BTD.astype(mean_BT1.dtype) - mean_BT1) * scale_BT1, size
        )
        return n_BTD, dy_BTD.astype(mean_BT1.dtype)

    # n and dy are computed twice, or XLA writes dy * n in float32: `docs/performance.md`.
    again = lax.optimization_barrier(x_BTD), lax.optimization_barrier(dy_BTD)
    n_BTD, dy_BTD = wide(x_BTD, dy_BTD)
    g_BTD = dy_BTD * w_D
    mean_g, mean_gn = _means(axes, size, g_BTD, g_BTD * n_BTD)
    dx_BTD = axes.zero_hidden_padding((g_BTD - mean_g - n_BTD * mean_gn) * scale_BT1, size)
    tokens = tuple(range(dy_BTD.ndim - 1))
    n_BTD, dy_BTD = wide(*again)
    dw_D, db_D = (dy_BTD * n_BTD).sum(tokens), dy_BTD.sum(tokens)
    return dx_BTD.astype(x_BTD.dtype), dw_D.astype(w_D.dtype), db_D.astype(w_D.dtype)


_normalise.defvjp(_forward, _backward)


def _means(axes: ShardingAxes, size: int, *each: Array) -> list[Array]:
    """Means over D of several arrays, reduced in one message."""
    sums = axes.sum_over_hidden(tuple(x.sum(-1, keepdims=True) for x in each))
    return [s / size for s in sums]
