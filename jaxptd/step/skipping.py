"""Which steps are taken: one whose gradients are no numbers, or exploded, leaves all as it was.

And the scale of the loss in float16, whose smallest number is 6e-8: gradients are made of
loss x scale and divided by it in float32. An overflow costs a step and halves the scale; a long run
of good steps doubles it. It is a power of two, so it changes no digit.

Everything here is the same on every device and lies in the state, so a resumed run goes on alike.
Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxptd.config import Config
from jaxptd.errors import UserError

# scale: of the loss, float32; good: steps since it last changed, or one was skipped; skipped: in
# all; in_row: since the last step that was taken. int32.
Guard = dict[str, Array]
Metrics = dict[str, Array]

FIRST_SCALE = 2.0**15  # half of float16's range: the gradient of one token's loss is at most 1
LARGEST_SCALE = 2.0**64  # gradients of zero would double it for ever
GROW_AFTER = 2000  # good steps; as PyTorch's GradScaler


def scales(dtype: DTypeLike) -> bool:
    """Whether the loss is scaled in this precision."""
    return jnp.dtype(dtype) == jnp.float16


def new_guard(dtype: DTypeLike) -> Guard:
    """At step 0; the same fields in every precision. dtype: of the model."""
    none = jnp.zeros((), jnp.int32)
    scale = jnp.float32(FIRST_SCALE if scales(dtype) else 1)
    return {"scale": scale, "good": none, "skipped": none, "in_row": none}


def unscaled(tree: Any, scale: Array, dtype: DTypeLike) -> Any:
    """Loss and gradients of the loss, out of those of loss x scale."""
    return jax.tree.map(lambda x: x / scale, tree) if scales(dtype) else tree


@jax.named_scope("optimizer")
def advance(
    state: dict[str, Any], new: dict[str, Any], metrics: Metrics, config: Config
) -> tuple[dict[str, Any], Metrics]:
    """The next state, and the step's metrics with what was skipped.

    Args:
        state: before the step.
        new: what becomes of params and optimizer; if the step is not sound they stay as they are,
            bit for bit. (No copy: XLA selects where it would have written.)
        metrics: loss and grad_norm decide.
        config: of the run.
    """
    sound = is_sound(metrics["loss"], metrics["grad_norm"], config.optimizer.skip_above)
    kept = {name: jax.tree.map(partial(jnp.where, sound), new[name], state[name]) for name in new}
    before, dtype = state["guard"], config.model.dtype
    guard = after_step(before, sound, metrics["grad_norm"], dtype)
    more = {"skipped": guard["skipped"], "skipped_in_row": guard["in_row"]}
    more |= {"loss_scale": before["scale"]} if scales(dtype) else {}
    return {**kept, "step": state["step"] + 1, "guard": guard}, metrics | more


def is_sound(loss: Array, norm: Array, limit: float) -> Array:
    """Whether to take a step. limit: a gradient norm above it is an explosion; 0: none is."""
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    return sound & (norm <= limit) if limit else sound


def after_step(guard: Guard, sound: Array, norm: Array, dtype: DTypeLike) -> Guard:
    """The guard after a step.

    Args:
        guard: before it.
        sound: whether it was taken.
        norm: of its gradients; the scale is halved if it is not finite, not after an explosion.
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


# ---- outside the step -------------------------------------------------------------------------


def check_in_row(
    step: int, values: Mapping[str, float], *, limit: int, saved: Callable[[], Sequence[int]]
) -> None:
    """Raises UserError, with the reason, where too many steps in a row were skipped.

    Args:
        step: its number.
        values: its metrics.
        limit: steps in a row that end a run.
        saved: -> steps of the checkpoints that there are.
    """
    if values["skipped_in_row"] < limit:
        return
    strange = [n for n in ("loss", "grad_norm") if not math.isfinite(values[n])]
    name = strange[0] if strange else "grad_norm"
    above = "" if strange else ", above optimizer.skip_above,"
    steps = saved()
    last = f"the last good checkpoint is step {max(steps)}" if steps else "there is no checkpoint"
    way_on = "go on from it with another optimizer.skip_above, or " if steps else ""
    raise UserError(
        f"{name} is {values[name]:g}{above} at step {step}, the last of "
        f"{values['skipped_in_row']:.0f} in a row that were skipped (train.max_skipped={limit}); "
        f"{last}; {way_on}start again in another train.run_dir with a smaller "
        "optimizer.learning_rate or more warmup_steps"
    )


def check_parameters(step: int, params: Mapping[str, Array]) -> None:
    """Raises UserError, naming the first parameter that is not finite: it is not to be saved."""
    for name, p in params.items():
        if not _finite(p):
            raise UserError(
                f"parameter {name} is not finite after step {step}, which is not saved; start "
                "again in another train.run_dir with a smaller optimizer.learning_rate or more "
                "warmup_steps"
            )


@jax.jit
def _finite(p: Array) -> Array:
    """Of one parameter, so no more of them is on a device at once, wherever the state has them."""
    return jnp.isfinite(jax.device_put(p, jax.memory.Space.Device)).all()
