"""Pools of slots, and the loops that work on them in place.

A pool is an array `[slots, ...]`, or a tree of them. XLA writes into what a loop carries where it
lies; what the branches of a switch hand through it would copy.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import Axis

Instruction = dict[str, Array]  # the numbers that a plan has for a stage and tick
Carry = TypeVar("Carry")


def loop(
    name: str,
    carry: Carry,
    instruction: Instruction,
    body: Callable[[Carry, Instruction], Carry],
) -> Carry:
    """`body`, as often as `instruction[name]` says: 0 times or once.

    XLA takes out of a loop what is the same at each trip, collectives too, and would run it at
    every tick. So the numbers that a body reads depend on the trip, and it changes all that it
    reads of the carry.
    """

    def trip(i: Array, carry: Carry) -> Carry:
        return body(carry, {key: number + i for key, number in instruction.items()})

    with jax.named_scope(name):
        return lax.fori_loop(0, instruction[name], trip, carry)


def get(pool: Any, *where: Array | int) -> Any:
    """pool[*where, ...] of every array of a tree."""

    def one(x: Array) -> Array:
        size = (*[1] * len(where), *x.shape[len(where) :])
        return lax.dynamic_slice(x, _begin(x, where), size).reshape(x.shape[len(where) :])

    return jax.tree.map(one, pool)


def put(pool: Any, values: Any, *where: Array | int) -> Any:
    """The pool with pool[*where, ...] = values, for every array of a tree."""

    def one(pool: Array, x: Array) -> Array:
        x = as_varying(x, sorted(varying_axes(pool))).astype(pool.dtype)
        return lax.dynamic_update_slice(pool, x[(None,) * len(where)], _begin(pool, where))

    return jax.tree.map(one, pool, values)


def add(pool: Any, values: Any, where: Array) -> Any:
    """The pool with `values` added at pool[where, ...].

    Taken out and put back in one shape: else XLA for GPUs copies what was there first.
    """

    def one(pool: Array, x: Array) -> Array:
        before = lax.dynamic_slice_in_dim(pool, where, 1)
        return lax.dynamic_update_slice_in_dim(pool, before + x[None], where, 0)

    return jax.tree.map(one, pool, values)


def _begin(pool: Array, where: Sequence[Array | int]) -> list[Array]:
    """Where a slot begins; the same for `get` and `put`, or XLA copies what both touch."""
    return [jnp.int32(i) for i in (*where, *[0] * (pool.ndim - len(where)))]


def zeros(shape: Any, *lead: int) -> Array:
    """Zeros `[*lead, ...]` that vary as an array of that shape does, and over pp."""
    nothing = jnp.zeros((*lead, *shape.shape), shape.dtype)
    return as_varying(nothing, sorted({Axis.PP, *varying_axes(shape)}))
