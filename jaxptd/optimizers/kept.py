"""Optimizers that keep their old moments in a step that is not sound (`step/state.py`).

Where a direction follows from the new moments, they are chosen before it is computed: XLA then
writes each new moment over the old one, and reads it from there. With a choice afterwards it would
compute the new moments twice, for the state and for the direction, and for that keep a copy of the
old ones through the whole step.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array

Update: TypeAlias = optax.GradientTransformationExtraArgs  # `update` takes `sound`: see `chosen`


@jax.named_scope("optimizer")
def chosen(sound: Array | None, new: Any, old: Any) -> Any:
    """The arrays of `new` if a step is sound, else those of `old`, bit for bit; None: of `new`."""
    return new if sound is None else jax.tree.map(partial(jnp.where, sound), new, old)


def keeping(inner: optax.GradientTransformation) -> Update:
    """`inner`, whose direction does not follow from its new moments, with the choice of moments."""

    def update(
        grads: Any, state: Any, params: Any = None, *, sound: Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        direction, new = inner.update(grads, state, params)
        return direction, chosen(sound, new, state)

    return Update(inner.init, update)


def scale_by_adam(beta1: float, beta2: float, epsilon: float) -> Update:
    """optax's, with the choice of moments."""
    adam = optax.scale_by_adam(beta1, beta2, epsilon)

    def update(
        grads: Any, state: Any, params: Any = None, *, sound: Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        new = chosen(sound, adam.update(grads, state)[1], state)
        mean = optax.tree.bias_correction(new.mu, beta1, new.count)
        square = optax.tree.bias_correction(new.nu, beta2, new.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square), new

    return Update(adam.init, update)


def scale_by_momentum(decay: float) -> Update:
    """optax's `trace`, with the choice of moments."""
    momentum = optax.trace(decay)

    def update(
        grads: Any, state: Any, params: Any = None, *, sound: Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        new = chosen(sound, momentum.update(grads, state)[1], state)
        return new.trace, new

    return Update(momentum.init, update)
