"""Training in a pipeline: the forward and backward operations of a plan, and their gradients."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.pipeline.executor import Carry, CurrentLayer, Ticks
from jaxptd.pipeline.placement import Kind, of_stack
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import (
    Instruction,
    LayerInputs,
    ModelArrays,
    ModelFunctions,
    X,
    add,
    get,
    put,
    run_if,
    run_one,
    zeros,
)
from jaxptd.pipeline.split_backward import (
    PassedStorage,
    SplitBackward,
    TracedLayer,
    run_without_dead_code,
    trace_layer,
)

# ---- kinds of layers -----------------------------------------------------------------------------
# The kinds of layers in a pipeline: what each saves for backward, and its traced backward pass.
#
# Different stacks have different kinds. Within one part of the model, a stack has two kinds if only
# some of its layers recompute in backward (`model.remat_layers`).


@dataclasses.dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers that save the same arrays for backward.

    Args:
        number: the kind's number in the plan.
        kind: the layers.
        params: shapes of a layer's parameters, without the common ones.
        layer: any of them, traced.
        shapes: what one of them stores in the pools *saved* and *between*.
        split: its backward pass as B and W, if the schedule splits it.
        storage: where B's results wait for W.
        keep: arrays to save -> their form in pools.
        fetched: the inverse.
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
        """True if W reads any parameter of the layer; common ones are always available."""
        saved, count = len(self.shapes["saved"]), len(jax.tree.leaves(self.params))
        return self.split is not None and any(self.split.weight_reads[saved : saved + count])

    def get(self, pools: Sequence[Any], slot: Array, offset: Array) -> list[Array]:
        """The arrays of the layer at an offset in a slot's part; pools: one per kind."""
        arrays: list[Array] = self.fetched(get(pools[self.number], slot, offset - self.kind.begin))
        return arrays

    def put(
        self,
        pools: Sequence[Any],
        new: Sequence[Array] | dict[int, Array],
        slot: Array,
        offset: Array,
    ) -> list[Any]:
        """Replaces all of a layer's arrays in the pools, or those with numbers in `new`."""
        pool = list(pools[self.number])
        for i, x in new.items() if isinstance(new, dict) else enumerate(new):
            pool[i] = put(pool[i], self.keep(x), slot, offset - self.kind.begin)
        return [*pools[: self.number], pool, *pools[self.number + 1 :]]


# ---- a training step as a pipeline ---------------------------------------------------------------


def gradients(
    functions: ModelFunctions, plan: Plan, arrays: ModelArrays
) -> tuple[Any, dict[str, Any], Any, Any]:
    """Returns (the head's losses, gradients of layers by stack, of ends, of common parameters).

    All but the gradients of layers are this stage's partial sums, to be reduced over pp.
    """
    ticks = Training(functions, plan, arrays)
    carry = ticks.scan(ticks.start())
    return carry.total, carry.layers, carry.ends, carry.common


@final
class Training(Ticks):
    """The operations F, B and W; without W, B computes all gradients."""

    def __init__(self, functions: ModelFunctions, plan: Plan, arrays: ModelArrays) -> None:
        super().__init__(functions, plan, arrays)
        self.splits = plan.schedule.splits
        examples = {stack: self.example(stack) for stack in plan.stacks}
        self.kinds = [
            LayerKind.trace(
                run, examples[kind.stack], self.x, number=i, kind=kind, splits=self.splits
            )
            for i, (run, kind) in enumerate(zip(functions.layers, plan.kinds, strict=True))
        ]
        if functions.keep:
            self.kinds = [
                dataclasses.replace(kind, keep=keep, fetched=functions.fetched)
                for kind, keep in zip(self.kinds, functions.keep, strict=True)
            ]

    def start(self) -> Carry:
        """The carry before the first tick."""
        plan, (layers, ends, common) = self.plan, self.arrays.zeros
        pools = {
            name: [
                kind.keep(zeros(kind.shapes[name], plan.slots[of_stack(name, stack)], end - begin))
                for kind, (stack, begin, end) in zip(self.kinds, plan.kinds, strict=True)
            ]
            for name in ("saved", "between")
        }
        total = zeros(self.head[1])
        return self.initial(**pools, layers=layers, ends=ends, common=common, total=total)

    def compute(self, carry: Carry, instruction: Instruction) -> Carry:
        """Runs the operation of the stage and tick, if any; see `Plan.switched`."""
        bodies = {"backward": self._backward, "weight": self._weight, "forward": self._forward}
        shared = {name: bodies[name] for name in self.plan.switched}
        if self.splits:
            carry = run_if("backward", carry, instruction, self._backward)
        return run_one("operation", carry, instruction, shared)

    # ---- F --------------------------------------------------------------------------------------

    def _forward(self, carry: Carry, instruction: Instruction) -> Carry:
        """Forward through the first part's embedding and the layers."""
        carry = run_if("embed", carry, instruction, self._embed)
        layers = self._forward_only if self.plan.recompute else self._forward_saving
        return layers(carry, instruction)

    def _forward_only(self, carry: Carry, instruction: Instruction) -> Carry:
        """Runs the part's layers and saves nothing."""

        def run(carry: Carry, layer: CurrentLayer) -> Carry:
            params = self.gathered(layer.params)
            return carry._replace(
                x=self.functions.layers[layer.kind](params, layer.inputs, carry.x)
            )

        return self.each_layer("forward", carry, instruction, run)

    def _forward_saving(
        self, carry: Carry, instruction: Instruction, name: str = "forward"
    ) -> Carry:
        """Runs the part's layers and saves what their backward needs."""

        def run(carry: Carry, layer: CurrentLayer) -> Carry:
            kind, params = self.kinds[layer.kind], self.gathered(layer.params)
            x, new = kind.layer.forward(params, layer.inputs, carry.x)
            saved = kind.put(carry.saved, new, instruction[kind.saved], layer.offset)
            return carry._replace(x=x, saved=saved)

        return self.each_layer(name, carry, instruction, run)

    # ---- B --------------------------------------------------------------------------------------

    def _backward(self, carry: Carry, instruction: Instruction) -> Carry:
        """Backward through the last part's head, the layers and the first part's embedding."""
        if self.plan.recompute:
            dy, x = carry.x, get(carry.mail, instruction["input"])
            carry = self._forward_saving(carry._replace(x=x), instruction, "recompute")
            carry = carry._replace(x=dy)
        carry = run_if("head", carry, instruction, self._head)
        run = partial(self._input_backward if self.splits else self._layer_backward, instruction)
        carry = self.each_layer("backward", carry, instruction, run, reverse=True)
        return run_if("unembed", carry, instruction, self._unembed)

    def _head(self, carry: Carry, instruction: Instruction) -> Carry:
        """Adds the loss to the total; x becomes its gradient."""
        micro, _ = self.micro_batch(instruction["micro"])

        def head(ends: Any, x: X) -> tuple[Array, Any]:
            result: tuple[Array, Any] = self.functions.head(ends, micro, x)
            return result

        total, vjp, losses = jax.vjp(head, self.arrays.ends, carry.x, has_aux=True)
        ends, x = vjp(jnp.ones_like(total))
        ends = jax.tree.map(jnp.add, carry.ends, ends)
        return carry._replace(x=x, ends=ends, total=jax.tree.map(jnp.add, carry.total, losses))

    def _layer_backward(self, instruction: Instruction, carry: Carry, layer: CurrentLayer) -> Carry:
        """Computes all gradients of a layer; x, its output's gradient, becomes its input's."""
        kind, params = self.kinds[layer.kind], self._regathered(layer.params)
        saved = kind.get(carry.saved, instruction[kind.saved], layer.offset)
        gradients, x = kind.layer.backward(saved, params, layer.inputs, carry.x)
        return self._accumulate(gradients, instruction, carry, layer)._replace(x=x)

    def _input_backward(self, instruction: Instruction, carry: Carry, layer: CurrentLayer) -> Carry:
        """Computes only the gradient of a layer's input; `_weight` computes its parameters'."""
        kind, params = self.kinds[layer.kind], self._regathered(layer.params)
        assert kind.split is not None
        saved = kind.get(carry.saved, instruction[kind.saved], layer.offset)
        # Read before their slots are overwritten, or XLA on CPUs copies the pool at every layer.
        for i in (i for i in kind.storage.replaced if i is not None):
            saved[i] = lax.optimization_barrier(saved[i])
        x, passed = kind.split.input_backward((saved, params, layer.inputs), carry.x)
        in_saved, in_between = kind.storage.separate(passed)
        return carry._replace(
            x=x,
            saved=kind.put(carry.saved, in_saved, instruction[kind.saved], layer.offset),
            between=kind.put(carry.between, in_between, instruction[kind.between], layer.offset),
        )

    def _regathered(self, row: Any) -> tuple[Any, Any]:
        """A row of a stack -> the layer's parameters and the common ones, for backward."""
        return self.functions.regathered(row), self.arrays.common

    def _unembed(self, carry: Carry, instruction: Instruction) -> Carry:
        """Adds the gradients of the embedding; x becomes zeros, because no stage reads it."""
        micro, token_info = self.micro_batch(instruction["micro"])

        def backward(ends: Any, x: X) -> Any:
            return jax.vjp(lambda ends: self.functions.embed(ends, micro, token_info), ends)[1](x)[
                0
            ]

        ends = run_without_dead_code(backward, self.arrays.ends, carry.x)
        ends = jax.tree.map(jnp.add, carry.ends, ends)
        return carry._replace(x=jax.tree.map(jnp.zeros_like, carry.x), ends=ends)

    # ---- W --------------------------------------------------------------------------------------

    def _weight(self, carry: Carry, instruction: Instruction) -> Carry:
        """Computes the parameter gradients of each of the part's layers."""

        def run(carry: Carry, layer: CurrentLayer) -> Carry:
            kind = self.kinds[layer.kind]
            assert kind.split is not None
            row = layer.params
            layer_params = (
                self.functions.gathered(row) if kind.weight_backward_reads_params else kind.params
            )
            params = layer_params, self.arrays.common
            saved = kind.get(carry.saved, instruction[kind.saved], layer.offset)
            between = kind.get(carry.between, instruction[kind.between], layer.offset)
            passed = kind.storage.join(saved, between)
            gradients = kind.split.weight_backward((saved, params, layer.inputs), passed)
            return self._accumulate(gradients, instruction, carry, layer)

        return self.each_layer("weight", carry, instruction, run)

    def _accumulate(
        self, gradients: Any, instruction: Instruction, carry: Carry, layer: CurrentLayer
    ) -> Carry:
        """Adds a layer's gradients to the stage's."""
        of_layer, common = gradients
        of_layer = self.functions.reduce_scattered(of_layer, layer.params)
        row = instruction[of_stack("row", layer.stack)] + layer.offset
        summed = add(carry.layers[layer.stack], of_layer, row)
        return carry._replace(
            layers=carry.layers | {layer.stack: summed},
            common=jax.tree.map(jnp.add, carry.common, common),
        )
