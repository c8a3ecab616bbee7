"""Skips steps with non-finite or exploding gradients, and scales the float16 loss.

A skipped step leaves parameters and moments as they were. Loss scaling: float16's smallest number
is 6e-8, so gradients are computed of loss x scale, and divided by the scale in float32. An overflow
skips the step and halves the scale; a long run of good steps doubles the scale. The scale is a
power of two, so it changes no digit.

All of this is part of the state, the same on every device, so a resumed run continues identically.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# scale: of the loss, float32. As int32, good: steps since the scale changed or a step was skipped;
# skipped: steps skipped in all; in_row: steps skipped since the last one that was taken.
Guard = dict[str, Array]
Metrics = dict[str, Array]

FIRST_SCALE = 2.0**15  # half of float16's range: the gradient of one token's loss is at most 1
LARGEST_SCALE = 2.0**64  # gradients of zero would double it for ever
GROW_AFTER = 2000  # good steps, as in PyTorch's GradScaler


def scales(dtype: DTypeLike) -> bool:
    """True for the precision in which the loss is scaled."""
    return jnp.dtype(dtype) == jnp.float16


def new_guard(dtype: DTypeLike) -> Guard:
    """The guard of step 0, with the same fields in every precision. dtype: of the model."""
    none = jnp.zeros((), jnp.int32)
    scale = jnp.float32(FIRST_SCALE if scales(dtype) else 1)
    return {"scale": scale, "good": none, "skipped": none, "in_row": none}


def unscaled(tree: Any, scale: Array, dtype: DTypeLike) -> Any:
    """Divides loss and gradients by the scale, if this precision has one."""
    return jax.tree.map(lambda x: x / scale, tree) if scales(dtype) else tree


@jax.named_scope("optimizer")
def advance(
    state: dict[str, Any], new: dict[str, Any], metrics: Metrics, *, sound: Array, dtype: DTypeLike
) -> tuple[dict[str, Any], Metrics]:
    """The next state, and the step's metrics with the numbers of skipped steps.

    Args:
        state: before the step.
        new: params and optimizer after the update, which kept both if the step is not sound.
        metrics: of the step, with the norm of its gradients.
        sound: whether the step is taken, see `is_sound`.
        dtype: of the model.
    """
    before = state["guard"]
    guard = after_step(before, sound, metrics["grad_norm"], dtype)
    more = {"skipped": guard["skipped"], "skipped_in_row": guard["in_row"]}
    more |= {"loss_scale": before["scale"]} if scales(dtype) else {}
    return {**new, "step": state["step"] + 1, "guard": guard}, metrics | more


def is_sound(loss: Array, norm: Array, limit: float) -> Array:
    """True if a step is to be taken. limit: largest gradient norm of such a step; 0: any."""
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    return sound & (norm <= limit) if limit else sound


def after_step(guard: Guard, sound: Array, norm: Array, dtype: DTypeLike) -> Guard:
    """The guard after a step.

    Args:
        guard: before the step.
        sound: whether the step was taken.
        norm: of the gradients; the scale is halved if the norm is not finite, not if it is above
            the limit.
        dtype: of the model.
    """
    good, scale = jnp.where(sound, guard["good"] + 1, 0), guard["scale"]
    if scales(dtype):
        scale = jnp.where(good == GROW_AFTER, jnp.minimum(scale * 2, LARGEST_SCALE), scale)
        scale = jnp.where(jnp.isfinite(norm), scale, jnp.maximum(scale / 2, 1))
        good = jnp.where(good == GROW_AFTER, 0, good)
    return {
        "scale": scale,
        "good": good,
        "skipped": guard["skipped"] + ~sound,
        "in_row": jnp.where(sound, 0, guard["in_row"] + 1),
    }
