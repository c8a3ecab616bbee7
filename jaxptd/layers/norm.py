"""Layer normalisation. Letters: B batch, T position, D model."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import KEPT, TAKEN
from jaxptd.collectives import alike
from jaxptd.layers.form import TensorParallel
from jaxptd.params import ones, param, zeros

EPSILON = 1e-5  # GPT-2's


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + 1e-5) * w + b` over D; statistics in float32 at least.

    Where D is cut, each statistic is a sum over its parts. Where each device holds a slice of the
    sequence, its gradient of w and b is a partial sum: the type of x says so, and the sum is made
    where w is made to vary (by autodiff, or once a step).

    Source: Ba et al., arXiv 1607.06450.
    """

    def __init__(self, size: int, *, form: TensorParallel, rngs: nnx.Rngs) -> None:
        held = (form.padded_hidden(size),)
        self.w = param(rngs(), (size,), ones, spec=form.hidden_spec(), held=held, decay=False)
        self.b = param(rngs(), (size,), zeros, spec=form.hidden_spec(), held=held, decay=False)
        self.size, self.form = size, form

    @jax.named_scope("norm")
    def __call__(self, x_BTD: Array) -> Array:
        """x, as the residual stream has it, -> the same shape and type."""
        x_BTD, w_D, b_D = alike(checkpoint_name(x_BTD, TAKEN), self.w[...], self.b[...])
        return checkpoint_name(_normalise(x_BTD, w_D, b_D, self.form, self.size), TAKEN)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _normalise(x_BTD: Array, w_D: Array, b_D: Array, form: TensorParallel, size: int) -> Array:
    """Kept for backward: x, which others keep anyway, and two statistics of each token."""
    return _forward(x_BTD, w_D, b_D, form, size)[0]


def _forward(
    x_BTD: Array, w_D: Array, b_D: Array, form: TensorParallel, size: int
) -> tuple[Array, tuple[Array, ...]]:
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    mean_BT1 = checkpoint_name(_means(form, size, wide_BTD)[0], KEPT)
    centred_BTD = form.only_hidden(wide_BTD - mean_BT1, size)
    variance_BT1 = _means(form, size, centred_BTD**2)[0]
    scale_BT1 = checkpoint_name(lax.rsqrt(variance_BT1 + EPSILON), KEPT)
    y_BTD = (centred_BTD * scale_BT1 * w_D + b_D).astype(x_BTD.dtype)
    return y_BTD, (x_BTD, w_D, mean_BT1, scale_BT1)


def _backward(
    form: TensorParallel, size: int, kept: tuple[Array, ...], dy_BTD: Array
) -> tuple[Array, Array, Array]:
    """With n = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - n * mean(g n))."""
    x_BTD, w_D, mean_BT1, scale_BT1 = kept

    def wide(x_BTD: Array, dy_BTD: Array) -> tuple[Array, Array]:
        n_BTD = form.only_hidden((x_BTD.astype(mean_BT1.dtype) - mean_BT1) * scale_BT1, size)
        return n_BTD, dy_BTD.astype(mean_BT1.dtype)

    # Apart, or XLA writes dy * n in float32 for both: `docs/performance.md`.
    again = lax.optimization_barrier(x_BTD), lax.optimization_barrier(dy_BTD)
    n_BTD, dy_BTD = wide(x_BTD, dy_BTD)
    g_BTD = dy_BTD * w_D
    mean_g, mean_gn = _means(form, size, g_BTD, g_BTD * n_BTD)
    dx_BTD = form.only_hidden((g_BTD - mean_g - n_BTD * mean_gn) * scale_BT1, size)
    tokens = tuple(range(dy_BTD.ndim - 1))
    n_BTD, dy_BTD = wide(*again)
    dw_D, db_D = (dy_BTD * n_BTD).sum(tokens), dy_BTD.sum(tokens)
    return dx_BTD.astype(x_BTD.dtype), dw_D.astype(w_D.dtype), db_D.astype(w_D.dtype)


_normalise.defvjp(_forward, _backward)


def _means(form: TensorParallel, size: int, *each: Array) -> list[Array]:
    """Over D, of several arrays in one message."""
    sums = form.sum_over_hidden(tuple(x.sum(-1, keepdims=True) for x in each))
    return [s / size for s in sums]
