"""States that Python code gives: compared with those that a program takes."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array
from jax.tree_util import keystr, tree_leaves_with_path

from jaxptd.errors import UserError, quoted
from jaxptd.step.state import State

USED = (
    "was given to train_step, which uses the memory again; set run.state to the state that "
    "train_step returns"
)


def as_state(state: Any, like: State, *, name: str = "state") -> State:
    """Returns a state as plain dicts, with the arrays that it has.

    Args:
        state: a dict of arrays, or of dicts of them.
        like: shapes, precisions and shardings that it has to have, as `Program.abstract_state`.
        name: of the state, for messages.

    Raises:
        UserError: an entry is missing, unknown, or not as in `like`; names the first.
    """
    given, wanted = _entries(state, name), _entries(like, name)
    for key in [*wanted, *given]:
        if key not in given:
            raise UserError(f"{name}{key} is missing; use every entry of program.abstract_state")
        if key not in wanted:
            raise UserError(f"{name}{key} is no entry of this program's state; leave it out")
        if wrong := _difference(given[key], wanted[key]):
            raise UserError(f"{name}{key} {wrong}")
    return jax.tree.unflatten(jax.tree.structure(like), [given[key] for key in wanted])


def check_unused(state: State) -> None:
    """Raises UserError if a step has donated the memory of a state's arrays."""
    for path, x in tree_leaves_with_path(state):
        if x.is_deleted():
            raise UserError(f"state{keystr(path)} {USED}")


def _entries(state: Any, name: str) -> dict[str, Any]:
    """The arrays of a state by their place in it, as `['params']['norm.scale']`."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise UserError(f"{name} is of type {kind}; use a dict of arrays: {{**run.state, ...}}")
    try:
        return {keystr(path): x for path, x in tree_leaves_with_path(dict(state))}
    except (TypeError, ValueError) as error:  # keys that cannot be sorted
        raise UserError(f"{name} has keys of several types; use those of run.state") from error


def _difference(x: Any, like: jax.ShapeDtypeStruct) -> str:
    """Says in which way an array is not like another; empty if it is."""
    if not isinstance(x, Array):
        return f"is of type {type(x).__name__}; use a JAX array: jax.device_put(x, old.sharding)"
    if x.is_deleted():
        return USED
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        found, wanted = f"{x.dtype}{list(x.shape)}", f"{like.dtype}{list(like.shape)}"
        return f"is {quoted(found)}; this program has {quoted(wanted)}"
    if like.sharding is not None and not x.sharding.is_equivalent_to(like.sharding, x.ndim):
        return "is on other devices, or sharded in another way; use jax.device_put(x, old.sharding)"
    return ""
