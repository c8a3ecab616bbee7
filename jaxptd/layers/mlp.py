"""The MLP of a block, with or without a gate. Letters: B batch, T position, D model, F hidden."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import TAKEN
from jaxptd.config import Activation, BlockOptions
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.params import Initialiser


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """x P(z < x) for a standard normal z, by the error function.

    `jax.nn.gelu`'s, but for its derivative: that of jax 0.12's error function has no type under
    `check_vma`. Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    below = lax.erfc(-x * 0.5**0.5) / 2
    density = jnp.exp(-(x**2) / 2) / (2 * math.pi) ** 0.5
    return gelu(x), dx * (below + x * density)


ACTIVATIONS: Mapping[Activation, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu-tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@partial(jax.checkpoint, static_argnums=(1, 2))
def _activate(h: Array, activation: Activation, gated: bool) -> Array:
    """Activation of h[B, T, F], or of a gate and h, `[B, T, 2, F]`: -> h[B, T, F].

    Backward recomputes it from h, which is saved anyway.
    """
    act = ACTIVATIONS[activation]
    return act(h[..., 0, :]) * h[..., 1, :] if gated else act(h)


class MLP(nnx.Module):
    """`act(x w_up + b_up) w_down + b_down`; with a gate `(act(x w_gate) * (x w_up)) w_down`.

    The activation is elementwise and needs no collective. A gate and w_up are one array
    `[D, 2, F]` and one product, so that x is gathered once.

    Args:
        size: D.
        hidden: F.
        options: activation, gate and biases.
        form: how matrices are sharded.
        rngs: random keys of the initial weights.
        init_out: initialiser of w_down.

    Source: Shazeer, arXiv 2002.05202 (gates).
    """

    def __init__(
        self,
        size: int,
        hidden: int,
        *,
        options: BlockOptions,
        form: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        bias, gates = options.linear_bias == "all", (2,) if options.gated else ()
        self.up = ColumnParallelLinear(
            size,
            (*gates, hidden),
            shard_dim=len(gates),
            parts=len(gates),
            form=form,
            rngs=rngs,
            bias=bias,
        )
        self.down = RowParallelLinear(
            (hidden,), size, form=form, rngs=rngs, init=init_out, bias=bias
        )
        self.activation, self.gated = options.activation, options.gated

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: Array) -> Array:
        """x as the residual stream has it -> the same."""
        h_BTF = _activate(self.up.kept(x_BTD), self.activation, self.gated)
        return self.down(checkpoint_name(h_BTF, TAKEN))
