"""Parameters and gradients under Hugging Face's names and shapes."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_argument
from jaxptd.hf.mapping import rules_of
from jaxptd.step import Program

Tensors = dict[str, np.ndarray]


def names(
    program: Program, params: Mapping[str, Any], *, is_canonical: bool | None = None
) -> Tensors:
    """Parameters or gradients under the names and in the shapes of Hugging Face's files.

    Args:
        program: with the model.
        params: some or all of its parameters, or their gradients: canonical, as
            `Run.loss_and_gradients` and `Program.canonical` give them, or as `run.state` has them.
        is_canonical: which of the two; None tells them by shape and kind, numpy arrays being
            canonical. Only in pipelines can JAX arrays of both have the same shape.

    Raises:
        UserError: one is no parameter of the model, of another shape, or either form could be
            meant; or the family has no Hugging Face names.
    """
    check_argument("jaxptd.hf.names", "program", program, Program)
    check_argument("jaxptd.hf.names", "params", params, dict)
    found: Tensors = {}
    ours = {name: info.shape for name, info in program.infos.items()}
    rules = rules_of(program.config.model.family, ours)
    for name, x in canonical(program, params, is_canonical):
        for rule in rules[name]:
            found |= rule.tensors(x)
    return found


def canonical(
    program: Program, params: Mapping[str, Any], is_canonical: bool | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter, canonical, one at a time on the host. Arguments and errors as of `names`."""
    stored = program.states.stored
    if unknown := [name for name in params if name not in stored]:
        raise UserError(f"the model has no parameter {quoted(unknown[0])}; see Program.infos")
    shapes = {name: tuple(np.shape(x)) for name, x in params.items()}
    guess = is_canonical is None
    is_stored = not is_canonical and (
        not guess or any(shapes[name] != stored[name].shape for name in params)
    )
    for name, x in params.items():
        each = stored[name]
        if shapes[name] != (each.stored_shape if is_stored else each.shape):
            raise UserError(
                f"{name} is {list(shapes[name])}; the canonical parameter is {list(each.shape)}"
            )
        if guess and not is_stored and isinstance(x, jax.Array) and _is_ambiguous(program, name):
            raise UserError(
                f"{name} has this shape both canonical and in the state; say is_canonical=True for "
                "what program.canonical gives, else False"
            )
        yield name, np.asarray(each.to_canonical(x) if is_stored else x)


def _is_ambiguous(program: Program, name: str) -> bool:
    """True if the state has a parameter in another order, but of the same shape."""
    each = program.states.stored[name]
    return each.shape == each.stored_shape and not each.is_canonical
