"""Layer normalisation. Letters: B batch, T position, D model."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxptd.layers.form import TensorParallel
from jaxptd.params import ones, param, zeros

EPSILON = 1e-5  # GPT-2's


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + 1e-5) * w + b` over D; statistics in float32 at least.

    Where each device holds a slice of the sequence, its gradient of w and b is a partial sum: the
    type of x says so, and the sum is made where w is made to vary (by autodiff, or once a step).
    Backward computes the statistics again from x, which is kept anyway.

    Source: Ba et al., arXiv 1607.06450.
    """

    def __init__(self, size: int, *, form: TensorParallel, rngs: nnx.Rngs) -> None:
        held = (form.padded_hidden(size),)
        self.w = param(rngs(), (size,), ones, spec=form.hidden_spec(), held=held, decay=False)
        self.b = param(rngs(), (size,), zeros, spec=form.hidden_spec(), held=held, decay=False)
        self.size, self.form = size, form

    def __call__(self, x_BTD: Array) -> Array:
        """x, as the residual stream has it, -> the same shape and type."""

        @jax.checkpoint
        def normalise(x: Array, w: Array, b: Array) -> Array:
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            centred = self.form.only_hidden(wide - self._mean(wide), self.size)
            return (centred * lax.rsqrt(self._mean(centred**2) + EPSILON) * w + b).astype(x.dtype)

        return normalise(x_BTD, self.w[...], self.b[...])

    def _mean(self, x: Array) -> Array:
        return self.form.sum_over_hidden(x.sum(-1, keepdims=True)) / self.size
