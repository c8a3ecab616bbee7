"""The kinds of layers that a pipeline runs: what each keeps for backward, and how it runs backward.

Layers of one part are of two kinds where only some of them compute again (`model.remat_layers`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jaxptd.pipeline.model import LayerInputs
from jaxptd.pipeline.pools import get, put, zeros
from jaxptd.pipeline.split_backward import Between, Halves, Layer, trace_layer


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Layers that keep the same.

    Args:
        number: of the kind.
        parameters: how many a layer has.
        begin: the first of these layers in each part.
        layer: one of them, with its backward pass.
        shapes: of what lies in the pools *saved* and *between* for one of them.
        halves: of its backward, where the schedule splits it.
        between: where what passes between the halves lies.
    """

    number: int
    parameters: int
    begin: int
    layer: Layer
    shapes: dict[str, list[Any]]
    halves: Halves | None
    between: Between

    @classmethod
    def of(
        cls,
        run: Callable,
        example: tuple[Any, LayerInputs],
        x: Array,
        *,
        number: int,
        begin: int,
        split: bool,
    ) -> "Kind":
        """Traces a layer, `run(params, inputs, x) -> x`; example: its parameters and inputs."""
        layer, saved = trace_layer(run, *example, x)
        halves, between = None, Between((), [])
        if split:
            kept = [zeros(shape) for shape in saved]
            halves = layer.split(kept, *example, x)
            _, passed = jax.eval_shape(halves.now, (kept, *example), x)
            between = Between.over(saved, halves.needs, passed)
        shapes = {"saved": saved, "between": between.shapes}
        parameters = len(jax.tree.leaves(example[0]))
        return cls(number, parameters, begin, layer, shapes, halves, between)

    @property
    def reads_parameters(self) -> bool:
        """Whether the second half of backward does."""
        kept, count = len(self.shapes["saved"]), self.parameters
        return self.halves is not None and any(self.halves.needs[kept : kept + count])

    def get(self, pools: Sequence[Any], slot: Array, at: Array) -> list[Array]:
        """What lies in a slot for layer `at` of a part; pools: of each kind."""
        return get(pools[self.number], slot, at - self.begin)

    def put(
        self, pools: Sequence[Any], new: Sequence[Array] | dict[int, Array], slot: Array, at: Array
    ) -> list[Any]:
        """The pools with that put in, or some of it, by its numbers there."""
        own = list(pools[self.number])
        for i, x in new.items() if isinstance(new, dict) else enumerate(new):
            own[i] = put(own[i], x, slot, at - self.begin)
        return [*pools[: self.number], own, *pools[self.number + 1 :]]
