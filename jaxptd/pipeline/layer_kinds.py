"""The kinds of layers in a pipeline: what each saves for backward, and its traced backward pass.

Layers of different stacks are of different kinds. Layers of one stack in one part of the model are
of two kinds if only some of them recompute in backward (`model.remat_layers`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jaxptd.pipeline.model import LayerInputs, X
from jaxptd.pipeline.placement import Kind, of_stack
from jaxptd.pipeline.pools import get, put, zeros
from jaxptd.pipeline.split_backward import PassedStorage, SplitBackward, TracedLayer, trace_layer


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers that save the same arrays for backward.

    Args:
        number: of the kind in the plan.
        kind: the layers.
        params: shapes of a layer's parameters, without the common ones.
        layer: any of them, traced.
        shapes: what one of them keeps in the pools *saved* and *between*.
        split: its backward pass as B and W, if the schedule splits it.
        storage: where B's results wait for W.
        keep: arrays to save -> as pools keep them.
        fetched: the other way.
    """

    number: int
    kind: Kind
    params: Any
    layer: TracedLayer
    shapes: dict[str, list[Any]]
    split: SplitBackward | None
    storage: PassedStorage
    keep: Callable[[Any], Any] = lambda arrays: arrays
    fetched: Callable[[Any], Any] = lambda kept: kept

    @classmethod
    def trace(
        cls,
        run: Callable,
        example: tuple[Any, LayerInputs],
        x: X,
        *,
        number: int,
        kind: Kind,
        splits: bool,
    ) -> "LayerKind":
        """Traces a layer, `run((params, common), inputs, x) -> x`; example: all but x."""
        layer, saved = trace_layer(run, *example, x)
        split, storage = None, PassedStorage()
        if splits:
            arrays = zeros(saved)
            split = layer.split(arrays, *example, x)
            _, passed = jax.eval_shape(split.input_backward, (arrays, *example), x)
            storage = PassedStorage.plan(saved, split.weight_reads, passed)
        shapes = {"saved": saved, "between": [*storage.between]}
        params, _ = example[0]
        return cls(number, kind, params, layer, shapes, split, storage)

    @property
    def saved(self) -> str:
        """The column of the plan with the slot in the pool *saved*."""
        return of_stack("saved", self.kind.stack)

    @property
    def between(self) -> str:
        """The column of the plan with the slot in the pool *between*."""
        return of_stack("between", self.kind.stack)

    @property
    def weight_backward_reads_params(self) -> bool:
        """True if W reads any parameter of the layer; common ones are there in any case."""
        saved, count = len(self.shapes["saved"]), len(jax.tree.leaves(self.params))
        return self.split is not None and any(self.split.weight_reads[saved : saved + count])

    def get(self, pools: Sequence[Any], slot: Array, offset: Array) -> list[Array]:
        """The arrays of the layer at an offset in a part in a slot; pools: one for each kind."""
        found: list[Array] = self.fetched(get(pools[self.number], slot, offset - self.kind.begin))
        return found

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
            pool[i] = put(pool[i], self.keep(x), slot, offset - self.kind.begin)
        return [*pools[: self.number], pool, *pools[self.number + 1 :]]
