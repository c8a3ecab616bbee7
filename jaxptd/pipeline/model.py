"""A model as a pipeline runs it: its functions, and the arrays that they run on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

X = Any  # what a layer takes and returns: a tree of arrays, all of which get gradients


class LayerInputs(NamedTuple):
    """The inputs of a layer besides its parameters and x; none of them gets a gradient.

    places: where the tokens are in the global batch (`jaxptd.layers.dropout.Places`).
    number: of the layer in the model, int32.
    cache: keys and values of the tokens before; None in training.
    """

    places: Any
    number: Any
    cache: Any = None


class ModelFunctions(NamedTuple):
    """The model as functions. A micro-batch is one element of `ModelArrays.micro`.

    embed: (ends, micro-batch, places) -> x.
    layers: one function for each of `Plan.kinds`: ((a layer's parameters, `ModelArrays.common`),
        `LayerInputs`, x) -> x in training, -> (x, cache) in a forward pass.
    head: (ends, micro-batch, x) -> in training (the micro-batch's share of the loss, a tree of
        its terms); in a forward pass any tree. Both trees are summed over micro-batches.
    places: (micro-batch, `ModelArrays.shared`) -> places of its tokens.
    gathered: a row of a stack in `ModelArrays.layers` -> a layer's parameters, for forward.
    regathered: the same, for backward.
    reduce_scattered: (gradients of those parameters, the row) -> gradients to accumulate.
    keep: one function for each of `Plan.kinds`: arrays that layers save -> as pools keep them, such
        as in host memory; none: as they are.
    fetched: what pools keep -> on the device.
    unroll: unrolls the loop over layers of a stack of which all parts have the same number.
    """

    embed: Callable[[Any, Any, Any], X]
    layers: Sequence[Callable[..., Any]]
    head: Callable[[Any, Any, X], Any]
    places: Callable[[Any, Any], Any]
    gathered: Callable[[Any], Any] = lambda row: row
    regathered: Callable[[Any], Any] = lambda row: row
    reduce_scattered: Callable[[Any, Any], Any] = lambda gradients, row: gradients
    keep: Sequence[Callable[[Any], Any]] = ()
    fetched: Callable[[Any], Any] = lambda kept: kept
    unroll: bool = False


class ModelArrays(NamedTuple):
    """Parameters, which vary over pp, and the micro-batches of a step.

    layers: of each stack, by its name, the parameters of this stage's layers.
    ends: parameters of the embedding and of the head.
    micro: the micro-batches, `[M, ...]` of each array.
    shared: what all micro-batches have in common.
    common: parameters that layers of any stack read, in every part of the model.
    zeros: (of layers, of ends, of common), to add gradients to; a forward pass needs none.
    """

    layers: Mapping[str, Any]
    ends: Any
    micro: Any
    shared: Any
    common: Any = ()
    zeros: tuple[Any, Any, Any] = ((), (), ())
