"""A model as a pipeline runs it: functions, and the arrays they run on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array


class Parts(NamedTuple):
    """What a model is made of, as functions.

    With given = (shared, micro-batch): embed: (ends, given) -> x. layers, one of each kind that the
    plan has: (parameters, (given, number), x) -> x, or in a forward pass (parameters, (given,
    number), x, state) -> (x, state).
    head: (ends, given, x) -> its share of the loss; in a forward pass any array, which is added up.
    fetch: a row of `Inputs.layers` -> a layer's parameters.
    fetch_again: the same, for backward.
    home: (gradients of those, the row) -> what is added up of them.
    unroll: write layers out instead of looping, where all parts have as many.
    """

    embed: Callable[[Any, Any], Array]
    layers: Sequence[Callable[..., Any]]
    head: Callable[[Any, Any, Array], Any]
    fetch: Callable[[Any], Any] = lambda own: own
    fetch_again: Callable[[Any], Any] = lambda own: own
    home: Callable[[Any, Any], Any] = lambda found, own: found
    unroll: bool = False


class Inputs(NamedTuple):
    """Parameters, which vary over pp, the micro-batches, `[M, ...]` each, and what they share.

    zeros: to add gradients to, of layers and of ends; a forward pass needs none.
    """

    layers: Any
    ends: Any
    micro: Any
    shared: Any
    zeros: tuple[Any, Any] = ((), ())
