"""AdamW, Lion, SGD, Muon and Adafactor with warm-up, decay and clipping, on shards of parameters.

The first three are elementwise, so they run on shards as they would on whole arrays; the other two
look at whole matrices (`jaxptd/optimizers/`).
Source: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Chen et al., arXiv 2302.06675 (Lion);
Pascanu et al., arXiv 1211.5063 (clipping); Hu et al., arXiv 2404.06395 (warm-up, stable, decay).
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.config import Config, OptimizerConfig, OptimizerName
from jaxptd.optimizers.adafactor import scale_by_factors
from jaxptd.optimizers.moments import Average, is_orthogonalised
from jaxptd.optimizers.muon import orthogonal_direction, running_mean
from jaxptd.params import Params, Stored
from jaxptd.zero.shards import computed_on_host, is_on_host, on_device

FINAL_FRACTION = 0.1  # of the peak learning rate, at the end of a decay
COOLDOWN_FRACTION = 0.1  # of all steps, where the decay is wsd


def learning_rate(config: OptimizerConfig, *, step: Array, steps: int) -> Array:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then decay; float32."""
    done, warmup = step.astype(jnp.float32), config.warmup(steps)
    warm = jnp.minimum(1.0, (done + 1) / max(warmup, 1))
    begin, end = warmup, config.decay_steps or steps  # the step after the decay's last
    if config.decay == "wsd":
        cooldown = config.cooldown_steps or max(round(COOLDOWN_FRACTION * end), 1)
        begin = max(end - 1 - cooldown, begin)
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


# ---- directions ----------------------------------------------------------------------------------
# A step that is not sound (`step/state.py`) keeps the old moments. Where a direction follows from
# the new moments, they are chosen before it is computed: XLA then writes each new moment over the
# old one, and reads it from there. With a choice afterwards it would compute the new moments twice,
# for the state and for the direction, and keep a copy of the old ones through the whole step.

Update: TypeAlias = optax.GradientTransformationExtraArgs  # `update` takes `sound`


def keeping(
    inner: optax.GradientTransformation,
    direction: Callable[[Any, Any, Any], Any] | None = None,
) -> Update:
    """`inner`, whose moments stay as they were, bit for bit, in a step that is not sound.

    Args:
        inner: computes new moments.
        direction: (gradients, chosen moments, old moments) -> the direction; None: `inner`'s, which
            does not follow from the new moments.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, sound: Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        found, new = inner.update(grads, state, params)
        if sound is not None:
            with jax.named_scope("optimizer"):
                new = jax.tree.map(partial(jnp.where, sound), new, state)
        return found if direction is None else direction(grads, new, state), new

    return Update(inner.init, update)


def _adam(config: OptimizerConfig) -> Update:
    def direction(_: Any, new: Any, old: Any) -> Any:
        mean = optax.tree.bias_correction(new.mu, config.beta1, new.count)
        square = optax.tree.bias_correction(new.nu, config.beta2, new.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.epsilon), mean, square)

    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return keeping(adam, direction)


def _muon(config: OptimizerConfig, stored: Mapping[str, Stored]) -> Update:
    """Orthogonal momentum for the matrices of layers, Adam for everything else."""
    direction = partial(orthogonal_direction, config.momentum, stored)
    rules = {"matrix": keeping(running_mean(config.momentum), direction), "other": _adam(config)}
    kinds = {n: "matrix" if is_orthogonalised(each) else "other" for n, each in stored.items()}

    def update(grads: Params, state: Any, params: Any = None, **others: Any) -> tuple[Any, Any]:
        rule = optax.partition(rules, {name: kinds[name] for name in grads})
        return rule.update(grads, state, params, **others)

    return Update(optax.partition(rules, kinds).init, update)


# Of a config and of how parameters are held, optax's transformation of gradients; on shards.
Direction = Callable[[OptimizerConfig, Mapping[str, Stored]], Update]
DIRECTIONS: Mapping[OptimizerName, Direction] = {
    "adamw": lambda c, _: _adam(c),
    "lion": lambda c, _: keeping(optax.scale_by_lion(c.beta1, c.beta2)),
    "sgd": lambda c, _: keeping(optax.trace(c.beta1), lambda grads, new, old: new.trace),
    "muon": _muon,
    "adafactor": lambda _, stored: keeping(scale_by_factors(stored)),
}


def make_optimizer(config: OptimizerConfig, stored: Mapping[str, Stored]) -> Update:
    """The step that is subtracted from parameters: the rate times direction plus weight decay.

    The rate is the learning rate times the parameter's factor. `update` takes all parameters, or
    some of them with their moments, the learning rate as `rate`, and `sound`: whether the step is
    taken. If it is not, moments and averages stay as they were, and the step means nothing.
    """
    stored = {name: each for name, each in stored.items() if each.info.optimized}
    decays = {name: each.info.decay for name, each in stored.items()}
    rates = {name: config.rate_of(name) for name in stored}
    parts = [
        DIRECTIONS[config.name](config, stored),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda some: {name: decays[name] for name in some}
        ),
        optax.GradientTransformationExtraArgs(
            lambda _: optax.EmptyState(),
            lambda steps, state, _=None, *, rate=1.0, **__: (
                {n: jnp.asarray(rate, x.dtype) * rates[n] * x for n, x in steps.items()},
                state,
            ),
        ),
    ]
    if config.ema_decay:
        parts.append(keeping(_moving_average(config.ema_decay)))
    return optax.chain(*parts)


def _moving_average(decay: float) -> optax.GradientTransformation:
    """The exponential moving average of parameters: decay^age weighs those after each step.

    The weights' sum is 1 (as Adam corrects its means), so random initial parameters have no part.
    """

    @jax.named_scope("optimizer")
    def update(steps: Params, state: Average, params: Any = None) -> tuple[Params, Average]:
        number, average = state.steps + 1, {}
        for name, old in state.average.items():
            share = (decay - 1) / jnp.expm1(math.log(decay) * number.astype(old.dtype))
            average[name] = old + share * (params[name] - steps[name] - old)
        return steps, Average(number, average)

    return optax.GradientTransformation(lambda p: Average(jnp.zeros((), jnp.int32), p), update)


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


# ---- the update of parameters and moments, one parameter after another ---------------------------
# A state in host memory is copied to the device for the update. XLA copies as early as it can,
# which would be everything at the beginning of a step if it fits. So the first parameter's copies
# wait for the norm of all gradients, and each later parameter's for the previous update: while a
# parameter and its moments go back to the host, the next ones arrive.
#
# With `layout.update_on: host` gradients are copied to the host, whose CPUs compute the same.
# Source: Ren et al., ZeRO-Offload, arXiv 2101.06840.


class Scalars(NamedTuple):
    """The scalars of an update.

    rate: the learning rate.
    norm: of the gradients.
    sound: whether the step is taken; if not, parameters and moments stay, bit for bit.
    """

    rate: Array
    norm: Array
    sound: Array


def updated(
    config: Config,
    rule: Update,
    state: Mapping[str, Any],
    gradients: Params,
    scalars: Scalars,
) -> dict[str, Any]:
    """The new `params` and `optimizer`, on the device, or on the host if it computes them.

    Args:
        config: of the run.
        rule: of `make_optimizer`.
        state: `params` and `optimizer`, each array on the device or on the host.
        gradients: clipped.
        scalars: of the update.
    """
    # Dicts by name; other arrays of the optimizer are alike for all parameters.
    structure: Any
    trees, structure = jax.tree.flatten(
        state["optimizer"], is_leaf=lambda x: isinstance(x, dict) and x.keys() == gradients.keys()
    )
    params: Params = {}
    moments = []
    for name, gradient in gradients.items():
        old = {name: state["params"][name]}
        kept = structure.unflatten([{name: x[name]} if isinstance(x, dict) else x for x in trees])
        one, others = partial(_updated, rule, name), (gradient, scalars.rate, scalars.sound)
        if config.layout.update_on == "host":
            params[name], new = computed_on_host(one, old, kept, *others)
        else:
            if config.layout.offload != "none":
                old, kept = on_device(_after([scalars.norm, *params.values()], (old, kept)))
            params[name], new = one(old, kept, *others)
        moments.append(new)
    parts = zip(trees, *map(structure.flatten_up_to, moments), strict=True)
    joined = [
        functools.reduce(operator.or_, new) if isinstance(x, dict) else new[0] for x, *new in parts
    ]
    return {"params": params, "optimizer": structure.unflatten(joined)}


def _updated(rule: Update, name: str, old: Params, kept: Any, *others: Array) -> tuple[Array, Any]:
    """A new parameter and its moments; others: gradient, rate, whether the step is taken."""
    gradient, rate, sound = others
    steps, new = rule.update({name: gradient}, kept, old, sound=sound, rate=rate)
    step = steps[name]
    with jax.named_scope("optimizer"):
        return jnp.where(sound, old[name] - step, old[name]), new


def _after(others: list[Array], tree: Any) -> Any:
    """Arrays on the host, to be read when the last of the others has been computed.

    For each array it is the last that varies over no further axes, so that its type stays.
    """

    def after(x: Array) -> Array:
        if not is_on_host(x):
            return x
        axes = varying_axes(x)
        last = [each for each in others if varying_axes(each) <= axes][-1]
        return lax.optimization_barrier((x, as_varying(last, sorted(axes))))[0]

    return jax.tree.map(after, tree)
