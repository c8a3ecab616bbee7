"""AdamW, Lion, SGD, Muon and Adafactor with warm-up, decay and clipping, on shards of parameters.

The first three are elementwise, so they run on shards as they would on whole arrays; the other two
look at whole matrices (`jaxptd/optimizers/`).
Source: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Chen et al., arXiv 2302.06675 (Lion);
Pascanu et al., arXiv 1211.5063 (clipping); Hu et al., arXiv 2404.06395 (warm-up, stable, decay).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxptd.config import OptimizerConfig, OptimizerName
from jaxptd.optimizers.adafactor import scale_by_factors
from jaxptd.optimizers.kept import keeping, scale_by_adam, scale_by_momentum
from jaxptd.optimizers.moments import is_orthogonalised
from jaxptd.optimizers.muon import scale_by_orthogonal
from jaxptd.params import Params, Stored

FINAL_FRACTION = 0.1  # of the peak learning rate, at the end of a decay
COOLDOWN_FRACTION = 0.1  # of all steps, where the decay is wsd


def learning_rate(config: OptimizerConfig, *, step: Array, steps: int) -> Array:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then decay; float32."""
    done = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (done + 1) / max(config.warmup_steps, 1))
    begin, end = _decay_span(config, steps)
    progress = jnp.clip((done - begin) / max(end - 1 - begin, 1), 0.0, 1.0)
    fractions = {
        "constant": 1.0,
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "cosine": (1 + jnp.cos(math.pi * progress)) / 2,
    }
    decayed = jnp.asarray(fractions[config.decay], jnp.float32)
    final = config.min_learning_rate
    last = FINAL_FRACTION if final is None else final / config.learning_rate
    return jnp.float32(config.learning_rate) * warm * (last + (1 - last) * decayed)


def _decay_span(config: OptimizerConfig, steps: int) -> tuple[int, int]:
    """The last step at the peak, and the step after the last of the decay."""
    end = config.decay_steps or steps
    if config.decay != "wsd":
        return config.warmup_steps, end
    cooldown = config.cooldown_steps or max(round(COOLDOWN_FRACTION * end), 1)
    return max(end - 1 - cooldown, config.warmup_steps), end


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return scale_by_adam(config.beta1, config.beta2, config.epsilon)


def _muon(config: OptimizerConfig, stored: Mapping[str, Stored]) -> optax.GradientTransformation:
    """Orthogonal momentum for the matrices of layers, Adam for everything else."""
    rules = {"matrix": scale_by_orthogonal(config.momentum, stored), "other": _adam(config)}
    kinds = {name: _kind(each) for name, each in stored.items()}
    return optax.partition(rules, kinds)


def _kind(stored: Stored) -> str:
    return "matrix" if is_orthogonalised(stored) else "other"


# Of a config and of how parameters are held, optax's transformation of gradients; on shards.
Direction = Callable[[OptimizerConfig, Mapping[str, Stored]], optax.GradientTransformation]
DIRECTIONS: Mapping[OptimizerName, Direction] = {
    "adamw": lambda c, _: _adam(c),
    "lion": lambda c, _: keeping(optax.scale_by_lion(c.beta1, c.beta2)),
    "sgd": lambda c, _: scale_by_momentum(c.beta1),
    "muon": _muon,
    "adafactor": lambda _, stored: keeping(scale_by_factors(stored)),
}


def make_optimizer(
    config: OptimizerConfig, stored: Mapping[str, Stored]
) -> optax.GradientTransformationExtraArgs:
    """The direction plus the weight decay of parameters; scale it by minus the rate.

    `update` takes `sound`, too: whether the step is taken. If not, moments stay as they were, and
    the direction means nothing.
    """
    return optax.chain(
        DIRECTIONS[config.name](config, stored),
        optax.add_decayed_weights(
            config.weight_decay, mask={name: each.info.decay for name, each in stored.items()}
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
