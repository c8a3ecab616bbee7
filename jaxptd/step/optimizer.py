"""AdamW with warm-up, decay and global-norm clipping, on shards of parameters.

Everything but the norm is elementwise, so it runs on shards as it would on whole arrays.
Source: Loshchilov and Hutter, arXiv 1711.05101; Pascanu et al., arXiv 1211.5063 (clipping).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxptd.config import OptimizerConfig
from jaxptd.params import ParamInfo, Params, Stored

EPSILON = 1e-8
FINAL_FRACTION = 0.1  # of the peak learning rate, at the last step of a decay


def learning_rate(config: OptimizerConfig, *, step: Array, steps: int) -> Array:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then decay; float32."""
    done = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (done + 1) / max(config.warmup_steps, 1))
    rest = max(steps - config.warmup_steps - 1, 1)
    progress = jnp.clip((done - config.warmup_steps) / rest, 0.0, 1.0)
    fractions = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + jnp.cos(math.pi * progress)) / 2,
    }
    decayed = jnp.asarray(fractions[config.decay], jnp.float32)
    fraction = FINAL_FRACTION + (1 - FINAL_FRACTION) * decayed
    return jnp.float32(config.learning_rate) * warm * fraction


def adamw(config: OptimizerConfig, infos: Mapping[str, ParamInfo]) -> optax.GradientTransformation:
    """Adam's direction plus the weight decay that `infos` asks for; scale it by minus the rate."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, EPSILON),
        optax.add_decayed_weights(
            config.weight_decay, mask={name: info.decay for name, info in infos.items()}
        ),
    )


@jax.named_scope("optimizer")
def global_norm(grads: Params, stored: Mapping[str, Stored]) -> Array:
    """The norm of all gradients, each element counted once; reduces a scalar per set of axes."""
    squares: dict[tuple[str, ...], Any] = {}
    for name, g in grads.items():
        axes = tuple(sorted(stored[name].axes))
        squares[axes] = squares.get(axes, 0) + jnp.sum(jnp.square(g))
    return jnp.sqrt(
        sum(lax.psum(square, axes) if axes else square for axes, square in squares.items())
    )


@jax.named_scope("optimizer")
def clip(grads: Params, norm: Array, limit: float) -> Params:
    """Scales the gradients to a norm of at most `limit`; 0 never clips."""
    if limit == 0:
        return grads
    scale = limit / jnp.maximum(norm, limit)
    return {name: g * scale for name, g in grads.items()}
