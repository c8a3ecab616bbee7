"""The MLP of a block, with or without a gate. Letters: B batch, T position, D model, F hidden."""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.config import Activation, ModelConfig
from jaxptd.kernels.activation import FUSED, FusedActivation
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.params import Initialiser
from jaxptd.parts.mlp import MLPShape
from jaxptd.remat import SAVED_MATMUL_IN


@jax.custom_jvp
def gelu(x: Array) -> Array:
    """x P(z < x) for a standard normal z, by the error function.

    Equals `jax.nn.gelu`, whose derivative fails under `check_vma`: that of jax 0.12's error
    function has no type there. Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    below = lax.erfc(-x * 0.5**0.5) / 2
    density = jnp.exp(-(x**2) / 2) / (2 * math.pi) ** 0.5
    return gelu(x), dx * (below + x * density)


Elementwise = Callable[[Array], Array]


def gelu_tanh(x: Array) -> Array:
    """Approximates gelu by a hyperbolic tangent, `1 + tanh(u / 2) = 2 sigmoid(u)`.

    XLA would write `jax.nn.gelu`'s tangent to memory for backward; it recomputes this where it is
    used. Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    return x * jax.nn.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """g sigmoid(1.702 g) (u + 1), of a gate g of at most 7 and of u between -7 and 7.

    Source: OpenAI, arXiv 2508.10925 (gpt-oss), section 2.2, and its code.
    """
    gate = jnp.where(gate > LIMIT, LIMIT, gate)
    up = jnp.where(jnp.abs(up) > LIMIT, jnp.sign(up) * LIMIT, up)
    return gate * jax.nn.sigmoid(STEEPNESS * gate) * (up + 1)


LIMIT, STEEPNESS = 7.0, 1.702  # of `clamped_swiglu`
ACTIVATIONS: Mapping[Activation, Elementwise] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
GATES: Mapping[Activation, Callable[[Array, Array], Array]] = {"clamped-swiglu": clamped_swiglu}


@functools.cache
def hidden_units(activation: Activation, *, gated: bool) -> Elementwise:
    """The function of a first matmul's result: h[.., F], or a gate and h, `[.., 2, F]` -> [.., F].

    It is one object for each activation, so that JAX traces it once.
    """
    if not gated:
        return ACTIVATIONS[activation]
    of_gate = GATES.get(activation)
    if of_gate is None:
        act = ACTIVATIONS[activation]
        return lambda h: act(h[..., 0, :]) * h[..., 1, :]
    return lambda h: of_gate(h[..., 0, :], h[..., 1, :])


class MLP(nnx.Module):
    """`act(x w_up + b_up) w_down + b_down`; with a gate `(act(x w_gate) * (x w_up)) w_down`, or
    another function of the two.

    The activation is elementwise and needs no collective. A gate and w_up are one array `[D, 2, F]`
    and one matmul, so x is gathered once.

    Args:
        shape: its sizes, gate and biases.
        config: activation, and kernels.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial weights.
        init_out: initialiser of w_down.

    Source: Shazeer, arXiv 2002.05202 (gates).
    """

    def __init__(
        self,
        shape: MLPShape,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        self.up = ColumnParallelLinear.of(shape.up, tensor_parallel=tensor_parallel, rngs=rngs)
        self.down = RowParallelLinear.of(
            shape.down, tensor_parallel=tensor_parallel, rngs=rngs, init=init_out
        )
        options = config.block
        self.act = hidden_units(options.activation, gated=shape.gated)
        # XLA's kernel reads its slice of what a scan saved in place; ours would need a copy.
        ours = options.kernels == "triton" and not options.loops_keep_inputs
        fused = FUSED.get(options.activation) if ours else None
        self.fused = fused and FusedActivation(fused, shape.gated)
        self.looped = options.looped

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: Array) -> Array:
        """Maps the residual stream to the MLP's output, sharded alike."""
        return self.down(checkpoint_name(self.activated(x_BTD), SAVED_MATMUL_IN))

    def activated(self, x_BTD: Array) -> Array:
        """x -> h[B, T, F]; other kinds of MLP override this.

        Backward recomputes it from the first matmul's result, which is saved in any case.
        """
        if self.fused:
            return self.fused(self.up.kept(x_BTD, bare=True), self.up.bias)
        activate = jax.checkpoint(self.act, prevent_cse=not self.looped)
        return activate(self.up.kept(x_BTD))
