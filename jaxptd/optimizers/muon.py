"""Muon: momentum whose matrices are made orthogonal, for every matrix in a layer.

Source: Jordan et al., https://kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv 2502.16982
(the size of a step).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxptd.optimizers.matrices import apply_to_whole
from jaxptd.params import Stored

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0, and near 1 after five iterations
ITERATIONS = 5
RMS = 0.2  # of a step's elements, as AdamW's have it: both can have the same learning rate
TINY = 1e-8  # a matrix of zeros stays one


class Momentum(NamedTuple):
    """steps: so far, int32. mu: the running mean of gradients, by parameter."""

    steps: Array
    mu: Any


def running_mean(momentum: float) -> optax.GradientTransformation:
    """The running mean of gradients; momentum: its decay."""

    def init(params: Any) -> Momentum:
        return Momentum(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Momentum]:
        mu = optax.tree.update_moment(grads, state.mu, momentum, 1)
        return grads, Momentum(state.steps + 1, mu)

    return optax.GradientTransformation(init, update)


def orthogonal_direction(
    momentum: float, stored: Mapping[str, Stored], grads: Any, new: Momentum, old: Momentum
) -> Any:
    """The Nesterov momentum of gradients of matrices, made orthogonal.

    Args:
        momentum: decay of the running mean.
        stored: how each parameter is held, so that whole matrices can be made of shards.
        grads: gradients.
        new: moments after the step, or the old ones if it is not taken.
        old: moments before it.
    """
    steps = old.steps + 1
    ahead = optax.tree.bias_correction(new.mu, momentum, steps + 1)
    corrected = optax.tree.bias_correction(grads, momentum, steps)
    nesterov = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, corrected)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: apply_to_whole(orthogonalised, x, stored[path[0].key]), nesterov
    )


@jax.named_scope("muon")
def orthogonalised(x_SRC: Array) -> Array:
    """Each matrix of a stack, with all of its singular values near 1, times its size of a step.

    One after the other, so that the products of only one are in memory.
    """
    scale = RMS * math.sqrt(max(x_SRC.shape[1:]))
    return scale * lax.map(newton_schulz, x_SRC)


def newton_schulz(x_RC: Array) -> Array:
    """U p(s) V^T of a matrix U s V^T, where p, five times a polynomial, maps (0, 1] to about 1."""
    if x_RC.shape[0] > x_RC.shape[1]:  # the products are of the shorter side
        return newton_schulz(x_RC.T).T
    a, b, c = COEFFICIENTS
    x_RC = x_RC / (jnp.linalg.norm(x_RC) + TINY)
    for _ in range(ITERATIONS):
        gram_RR = x_RC @ x_RC.T
        x_RC = a * x_RC + (b * gram_RR + c * gram_RR @ gram_RR) @ x_RC
    return x_RC
