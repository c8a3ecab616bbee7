"""The update of parameters and moments, one parameter after another.

A state in host memory is copied to the device for it. XLA copies whatever waits for nothing as
early as it can: all of it at the beginning of a step, where a device has room. So the copies of the
first parameter wait for the norm of all gradients, and those of each other one for the update
before: while a parameter and its moments go back to the host, the next arrive.

With `layout.update_on: host` gradients are copied to the host, whose CPUs compute the same.
Source: Ren et al., ZeRO-Offload, arXiv 2101.06840.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.config import Config
from jaxptd.optimizers.kept import chosen
from jaxptd.params import Params, Stored
from jaxptd.step.optimizer import make_optimizer
from jaxptd.zero.host import computed_on_host, is_on_host, on_device


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
    stored: Mapping[str, Stored],
    state: Mapping[str, Any],
    gradients: Params,
    scalars: Scalars,
) -> dict[str, Any]:
    """The new `params` and `optimizer`, on the device, or on the host if it computes them.

    Args:
        config: of the run.
        stored: how the state holds each parameter.
        state: `params` and `optimizer`, each array on the device or on the host.
        gradients: clipped.
        scalars: of the update.
    """
    params: Params = {}
    moments = []
    for name in stored:
        old, kept = _part((state["params"], state["optimizer"]), name, stored)
        rule = make_optimizer(config.optimizer, {name: stored[name]})
        one, others = partial(_updated, rule, name), (gradients[name], scalars.rate, scalars.sound)
        if config.layout.update_on == "host":
            params[name], new = computed_on_host(one, old, kept, *others)
        else:
            old, kept = on_device(_after([scalars.norm, *params.values()], (old, kept)))
            params[name], new = one(old, kept, *others)
        moments.append(new)
    return {"params": params, "optimizer": _joined(moments, stored)}


def _updated(
    rule: optax.GradientTransformationExtraArgs, name: str, old: Params, kept: Any, *others: Array
) -> tuple[Array, Any]:
    """A new parameter and its moments; others: gradient, rate, whether the step is taken."""
    gradient, rate, sound = others
    direction, new = rule.update({name: gradient}, kept, old, sound=sound)
    step = rate.astype(old[name].dtype) * direction[name]
    return chosen(sound, old[name] - step, old[name]), new


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


def _part(tree: Any, name: str, names: Mapping[str, Any]) -> Any:
    """A tree whose dicts with all names have one of them."""

    def has_names(x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == names.keys()

    return jax.tree.map(lambda x: {name: x[name]} if has_names(x) else x, tree, is_leaf=has_names)


def _joined(parts: list[Any], names: Mapping[str, Any]) -> Any:
    """The tree that these are the parts of, one for each name; other arrays are alike in all."""

    def has_name(x: Any) -> bool:
        return isinstance(x, dict) and len(x) == 1 and x.keys() <= names.keys()

    def join(*each: Any) -> Any:
        return {k: v for x in each for k, v in x.items()} if has_name(each[0]) else each[0]

    return jax.tree.map(join, *parts, is_leaf=has_name)
