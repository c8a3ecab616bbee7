"""The kinds of layers in a pipeline: what each saves for backward, and its traced backward pass.

Layers of one part of the model are of two kinds if only some of them recompute in backward
(`model.remat_layers`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jaxptd.pipeline.model import LayerInputs, X
from jaxptd.pipeline.pools import get, put, zeros
from jaxptd.pipeline.split_backward import PassedStorage, SplitBackward, TracedLayer, trace_layer


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers that save the same arrays for backward.

    Args:
        number: of the kind.
        parameters: the number of parameters of a layer.
        begin: the offset in each part of the first layer of this kind.
        layer: any of them, traced.
        shapes: what one of them keeps in the pools *saved* and *between*.
        split: its backward pass as B and W, if the schedule splits it.
        storage: where B's results wait for W.
    """

    number: int
    parameters: int
    begin: int
    layer: TracedLayer
    shapes: dict[str, list[Any]]
    split: SplitBackward | None
    storage: PassedStorage

    @classmethod
    def trace(
        cls,
        run: Callable,
        example: tuple[Any, LayerInputs],
        x: X,
        *,
        number: int,
        begin: int,
        splits: bool,
    ) -> "LayerKind":
        """Traces a layer, `run(params, inputs, x) -> x`; example: its params and inputs."""
        layer, saved = trace_layer(run, *example, x)
        split, storage = None, PassedStorage((), [])
        if splits:
            arrays = zeros(saved)
            split = layer.split(arrays, *example, x)
            _, passed = jax.eval_shape(split.input_backward, (arrays, *example), x)
            storage = PassedStorage.plan(saved, split.weight_reads, passed)
        shapes = {"saved": saved, "between": storage.between}
        parameters = len(jax.tree.leaves(example[0]))
        return cls(number, parameters, begin, layer, shapes, split, storage)

    @property
    def weight_backward_reads_params(self) -> bool:
        """True if W reads any parameter of the layer."""
        saved, count = len(self.shapes["saved"]), self.parameters
        return self.split is not None and any(self.split.weight_reads[saved : saved + count])

    def get(self, pools: Sequence[Any], slot: Array, offset: Array) -> list[Array]:
        """The arrays of the layer at an offset in a part in a slot; pools: one for each kind."""
        return get(pools[self.number], slot, offset - self.begin)

    def put(
        self,
        pools: Sequence[Any],
        new: Sequence[Array] | dict[int, Array],
        slot: Array,
        offset: Array,
    ) -> list[Any]:
        """The pools with all of a layer's arrays replaced, or those whose numbers `new` has."""
        pool = list(pools[self.number])
        for i, x in new.items() if isinstance(new, dict) else enumerate(new):
            pool[i] = put(pool[i], x, slot, offset - self.begin)
        return [*pools[: self.number], pool, *pools[self.number + 1 :]]
