"""Pools of slots, and conditionals and loops that update them in place.

A pool is an array `[slots, ...]`, or a tree of them. XLA updates the carry of a loop in place, also
that of a conditional with one empty branch, and that of a switch if the branches that read a pool
come before those that write it. In another order it copies the pool.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import Axis

Instruction = dict[str, Array]  # a plan's numbers for a stage and tick
Carry = TypeVar("Carry")
Body = Callable[[Carry, Instruction], Carry]  # the operation of a conditional or of a loop

APART = "apart"  # the scope of `apart`

# XLA before that of jax 0.12 copies the carry of a conditional, at least on GPUs.
CONDITIONALS = jax.__version_info__ >= (0, 12)


def run_if(
    name: str,
    carry: Carry,
    instruction: Instruction,
    body: Body[Carry],
) -> Carry:
    """Runs `body` if `instruction[name]` is 1.

    The host of a GPU waits once for a conditional's predicate, but twice for a loop of one
    iteration. Between the conditional and the loops over layers XLA finds nothing to move out.
    """
    if not CONDITIONALS:
        return loop(name, carry, instruction, body)

    with jax.named_scope(name):
        taken = partial(_taken, body, instruction)
        return lax.cond(instruction[name] > 0, taken, lambda carry: carry, carry)


def run_one(
    name: str,
    carry: Carry,
    instruction: Instruction,
    bodies: Mapping[str, Body[Carry]],
) -> Carry:
    """Runs the body of the key for which `instruction[key]` is 1; nothing if all are 0.

    It is a switch with an empty last branch, so the host of a GPU waits once for all bodies.

    Args:
        name: of the switch, whose branches are numbered in the order of the bodies.
        carry: the arrays that the bodies change.
        instruction: 1 for at most one of these keys, else 0.
        bodies: by key, those that read a pool before those that write it.
    """
    if not CONDITIONALS:
        for key, body in reversed(tuple(bodies.items())):  # loops copy nothing in this order
            carry = loop(key, carry, instruction, body)
        return carry
    count = len(bodies)
    number = count - sum((count - i) * instruction[key] for i, key in enumerate(bodies))
    branches = [partial(_taken, body, instruction) for body in bodies.values()]
    with jax.named_scope(name):
        return lax.switch(number, [*branches, lambda carry: carry], carry)


def _taken(body: Body[Carry], instruction: Instruction, carry: Carry) -> Carry:
    """The carry after a body, varying as before, because all branches return the same types."""
    updated = body(carry, instruction)
    return jax.tree.map(lambda x, like: as_varying(x, sorted(varying_axes(like))), updated, carry)


def loop(
    name: str,
    carry: Carry,
    instruction: Instruction,
    body: Body[Carry],
) -> Carry:
    """Runs `body` zero times or once: `instruction[name]` times.

    XLA moves loop-invariant code, even collectives, out of a loop, and would run it at every tick.
    So the numbers that the body gets depend on the iteration, and the body must change every array
    of the carry that it reads.
    """
    with jax.named_scope(name):
        return lax.fori_loop(
            0,
            instruction[name],
            lambda i, carry: body(carry, {key: x + i for key, x in instruction.items()}),
            carry,
        )


def apart(
    carry: Carry, body: Callable[[Carry, Any], Carry], xs: Any, *, first: int = 0, times: int = 1
) -> Carry:
    """Runs `body` a number of times that is hidden from XLA.

    Outside of loops XLA allocates arrays at the beginning of the program, so arrays that are read
    and written here would take memory from then on. Unrolling two iterations into one would also
    take more.

    Args:
        carry: the arrays that the body changes.
        body: `(carry, x) -> carry`.
        xs: the iterations' inputs, `[n, ...]`.
        first: the index of the first iteration's x; each following one takes the next.
        times: the number of iterations.
    """
    now = {"number": jnp.int32(first), APART: lax.optimization_barrier(jnp.int32(times))}
    return loop(APART, carry, now, lambda carry, now: body(carry, get(xs, now["number"])))


def get(pool: Any, *where: Array | int) -> Any:
    """`pool[*where, ...]`, for every array of a tree."""
    dims = len(where)
    return jax.tree.map(
        lambda x: lax.dynamic_slice(x, _begin(x, where), (*[1] * dims, *x.shape[dims:])).reshape(
            x.shape[dims:]
        ),
        pool,
    )


def put(pool: Any, values: Any, *where: Array | int) -> Any:
    """The pool after `pool[*where, ...] = values`, for every array of a tree."""
    lead = (None,) * len(where)
    return jax.tree.map(
        lambda pool, x: lax.dynamic_update_slice(
            pool,
            as_varying(x, sorted(varying_axes(pool))).astype(pool.dtype)[lead],
            _begin(pool, where),
        ),
        pool,
        values,
    )


def add(pool: Any, values: Any, where: Array) -> Any:
    """The pool after `pool[where, ...] += values`, for every array of a tree.

    The slot is read and written in the same shape, or XLA for GPUs copies it first.
    """
    return jax.tree.map(
        lambda pool, x: lax.dynamic_update_slice_in_dim(
            pool, lax.dynamic_slice_in_dim(pool, where, 1) + x[None], where, 0
        ),
        pool,
        values,
    )


def _begin(pool: Array, where: Sequence[Array | int]) -> list[Array]:
    """The start indices of a slot: the same in `get` and `put`, or XLA copies what both access."""
    return [jnp.int32(i) for i in (*where, *[0] * (pool.ndim - len(where)))]


def zeros(shapes: Any, *lead: int) -> Any:
    """Zeros `[*lead, ...]` for every array of a tree, which vary as that array does and over pp."""
    return jax.tree.map(
        lambda x: as_varying(
            jnp.zeros((*lead, *x.shape), x.dtype), sorted({Axis.PP, *varying_axes(x)})
        ),
        shapes,
    )


def wide_zeros(parameters: Any) -> Any:
    """Zeros to add each array of a tree to, float32 at least, which vary as that array does."""
    return jax.tree.map(
        lambda p: as_varying(
            jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), sorted(varying_axes(p))
        ),
        parameters,
    )


# ---- a model as a pipeline runs it: its functions, and the arrays that they run on ---------------

X = Any  # a layer's input and output: a tree of arrays, all of which get gradients


class LayerInputs(NamedTuple):
    """The inputs of a layer besides its parameters and x; none of them gets a gradient.

    token_info: where the tokens are in the global batch (`jaxptd.layers.dropout.TokenInfo`).
    number: of the layer in the model, int32.
    cache: keys and values of the tokens before; None in training.
    """

    token_info: Any
    number: Any
    cache: Any = None


class ModelFunctions(NamedTuple):
    """The model as functions. A micro-batch is one element of `ModelArrays.micro`.

    embed: (ends, micro-batch, places) -> x.
    layers: one function for each of `Plan.kinds`: ((a layer's parameters, `ModelArrays.common`),
        `LayerInputs`, x) -> x in training, -> (x, cache) in a forward pass.
    head: (ends, micro-batch, x) -> in training (the micro-batch's share of the loss, a tree of
        its terms); in a forward pass any tree. Both trees are summed over micro-batches.
    token_info: (micro-batch, `ModelArrays.shared`) -> places of its tokens.
    gathered: a row of a stack in `ModelArrays.layers` -> a layer's parameters, for forward.
    regathered: the same, for backward.
    reduce_scattered: (gradients of those parameters, the row) -> gradients to accumulate.
    keep: one function for each of `Plan.kinds`: arrays that layers save -> as pools store them, for
        example in host memory. Empty stores them as they are.
    fetched: stored arrays -> on the device.
    unroll: unrolls the loop over a stack's layers if all its parts have equally many.
    """

    embed: Callable[[Any, Any, Any], X]
    layers: Sequence[Callable[..., Any]]
    head: Callable[[Any, Any, X], Any]
    token_info: Callable[[Any, Any], Any]
    gathered: Callable[[Any], Any] = lambda row: row
    regathered: Callable[[Any], Any] = lambda row: row
    reduce_scattered: Callable[[Any, Any], Any] = lambda gradients, row: gradients
    keep: Sequence[Callable[[Any], Any]] = ()
    fetched: Callable[[Any], Any] = lambda kept: kept
    unroll: bool = False


class ModelArrays(NamedTuple):
    """Parameters, which vary over pp, and the micro-batches of a step.

    layers: by stack, the parameters of this stage's layers.
    ends: parameters of the embedding and of the head.
    micro: the micro-batches, each array `[M, ...]`.
    shared: values that all micro-batches have in common.
    common: parameters that layers of any stack read, in every part of the model.
    zeros: arrays to add gradients of layers, ends and common to; a forward pass needs none.
    """

    layers: Mapping[str, Any]
    ends: Any
    micro: Any
    shared: Any
    common: Any = ()
    zeros: tuple[Any, Any, Any] = ((), (), ())
