"""Runs a plan: all ticks of a schedule in one `lax.scan`, inside a `shard_map`.

One tick of a stage, in training:

    x = mail[read]
    forward     embed (tokens -> x), the part's layers              F; embed: of the first part
    backward    head (x -> loss, then its gradient), the layers     B; head: of the last part,
                in reverse, unembed (gradient of the embedding)     unembed: of the first
    weight      gradients of the layers' weights                    W
    mail[keep] = x
    hops        permutes of x over pp, into the receiver's mail

Each name is a conditional that runs or not, by the plan's numbers for this stage and tick (the
`Instruction`). They are not branches of one switch, because XLA copies what branches pass through:
all gradients and saved activations at every tick. The carry of these conditionals is updated in
place, and the switch of hops passes on only what arrives. Inside forward, backward and weight each
stack has its own loop over the part's layers, with zero iterations where the part has none.

All stages take part in a hop. Other conditionals may contain collectives over any axis but pp,
along which the predicates of devices differ.

x is a tree of arrays, such as `x[B, T, D]`; a hop sends each of them.

Letters: M micro-batches, B batch, T position, D model.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import Axis
from jaxptd.pipeline.placement import layers_scope, of_stack
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import (
    Instruction,
    LayerInputs,
    ModelArrays,
    ModelFunctions,
    X,
    get,
    put,
    run_if,
    zeros,
)


class Carry(NamedTuple):
    """The state that a tick passes to the next.

    x: the activations or gradients of the current operation.
    mail, saved, between: the pools of slots, see `Plan`.
    layers: for each stack, gradients of the layers' parameters; in a forward pass their caches.
    ends, common: gradients of the other parameters, as in `ModelArrays`.
    total: the terms of the loss; in a forward pass the sum of the head's results.
    """

    x: X
    mail: Any
    saved: Any
    between: Any
    layers: dict[str, Any]
    ends: Any
    common: Any
    total: Any


class CurrentLayer(NamedTuple):
    """A layer of the current operation's part.

    stack: its stack's name. params: its row of the stack's parameters, which
    `ModelFunctions.gathered` turns into parameters.
    offset: distance of its row from the part's first row.
    kind: the number of its `LayerKind`.
    """

    stack: str
    params: Any
    inputs: LayerInputs
    offset: Array
    kind: int


RunLayer = Callable[[Carry, CurrentLayer], Carry]


def forward(
    functions: ModelFunctions,
    plan: Plan,
    arrays: ModelArrays,
    caches: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns (sum of the head's results, caches of each stack's layers).

    The sum is zero on all stages but the last part's.
    """
    ticks = ForwardPass(functions, plan, arrays)
    carry = ticks.scan(ticks.start(caches or dict.fromkeys(plan.stacks)))
    return carry.total, carry.layers


class Ticks(abc.ABC):
    """The base of forward passes and training: embedding, loops over layers, hops."""

    def __init__(self, functions: ModelFunctions, plan: Plan, arrays: ModelArrays) -> None:
        self.functions, self.plan, self.arrays = functions, plan, arrays
        self.first = as_varying(jnp.int32(0), [Axis.PP])
        micro, token_info = self.micro_batch(self.first)
        self.x = zeros(jax.eval_shape(functions.embed, arrays.ends, micro, token_info))
        self.head = jax.eval_shape(functions.head, arrays.ends, micro, self.x)

    @abc.abstractmethod
    def compute(self, carry: Carry, instruction: Instruction) -> Carry:
        """Runs a tick's operation, F, B or W, on `carry.x`."""

    def example(self, stack: str) -> tuple[Any, LayerInputs]:
        """Parameter shapes of a stack's layer, and a layer's inputs."""

        def first() -> Any:
            return self.gathered(get(self.arrays.layers[stack], self.first))

        return jax.eval_shape(first), LayerInputs(self.micro_batch(self.first)[1], self.first)

    def gathered(self, row: Any) -> tuple[Any, Any]:
        """A row of a stack -> the layer's parameters and the common ones, for forward."""
        return self.functions.gathered(row), self.arrays.common

    def micro_batch(self, number: Array) -> tuple[Any, Any]:
        """Returns (a micro-batch, the places of its tokens)."""
        micro = get(self.arrays.micro, number)
        return micro, self.functions.token_info(micro, self.arrays.shared)

    def initial(self, **others: Any) -> Carry:
        """The carry before the first tick; others: fields that differ between passes."""
        mail = zeros(self.x, self.plan.slots["mail"])
        empty = {"saved": (), "between": (), "ends": (), "common": ()}
        return Carry(x=self.x, mail=mail, **{**empty, **others})

    def scan(self, carry: Carry) -> Carry:
        """Runs all ticks."""
        stage = lax.axis_index(Axis.PP)
        hops = {"hops": jnp.asarray(self.plan.hops.chosen)}
        columns = {name: jnp.asarray(column) for name, column in self.plan.columns.items()}

        def tick(carry: Carry, numbers: tuple[Instruction, Instruction]) -> tuple[Carry, None]:
            of_stages, of_all = numbers
            of_stage = {name: get(column, stage) for name, column in of_stages.items()}
            return self.tick(carry, of_stage | of_all), None

        return lax.scan(tick, carry, (columns, hops))[0]

    def tick(self, carry: Carry, instruction: Instruction) -> Carry:
        carry = carry._replace(x=get(carry.mail, instruction["read"]))
        return self._send(self.compute(carry, instruction), instruction)

    def _embed(self, carry: Carry, instruction: Instruction) -> Carry:
        micro, token_info = self.micro_batch(instruction["micro"])
        x = self.functions.embed(self.arrays.ends, micro, token_info)
        return carry._replace(x=x, mail=put(carry.mail, x, instruction["read"]))

    def each_layer(
        self,
        name: str,
        carry: Carry,
        instruction: Instruction,
        run: RunLayer,
        *,
        reverse: bool = False,
    ) -> Carry:
        """Calls `run` for each layer of the current part: a loop for each kind of layers."""
        _, token_info = self.micro_batch(instruction["micro"])

        def one(i: Any, carry: Carry, number: int, begin: Any, end: Any) -> Carry:
            stack = self.plan.kinds[number].stack
            offset = end - 1 - i if reverse else begin + i
            params = get(self.arrays.layers[stack], instruction[of_stack("row", stack)] + offset)
            inputs = LayerInputs(token_info, instruction[of_stack("layer", stack)] + offset)
            return run(carry, CurrentLayer(stack, params, inputs, offset, number))

        kinds = list(enumerate(self.plan.kinds))
        for number, (stack, *rows) in reversed(kinds) if reverse else kinds:
            even, layers = self.plan.even(stack), instruction[of_stack("layers", stack)]
            begin, end = rows if even else (jnp.minimum(i, layers) for i in rows)
            body = partial(one, number=number, begin=begin, end=end)
            if self.functions.unroll and even:
                for i in range(end - begin):
                    carry = body(i, carry)
                continue
            with jax.named_scope(layers_scope(name, number)):
                carry = lax.fori_loop(0, end - begin, body, carry)
        return carry

    def _send(self, carry: Carry, instruction: Instruction) -> Carry:
        """Stores the result in the mail, and sends it to the stage that reads it."""
        mail, together = put(carry.mail, carry.x, instruction["keep"]), self.plan.hops.together
        branches = [partial(self._hop, hops, len(together[-1])) for hops in together]
        with jax.named_scope("hops"):
            arrived = lax.switch(instruction["hops"], branches, carry.x, instruction)
        for x, slot in arrived:
            mail = put(mail, x, slot)
        return carry._replace(mail=mail)

    def _hop(
        self, hops: Sequence[str], most: int, x: X, instruction: Instruction
    ) -> list[tuple[X, Array]]:
        """Sends x by some hops at once; returns what arrives, with its slot.

        Where other ticks take more hops, the result with its own slot fills up the list. A branch
        returns what arrives, not the mail, which XLA would copy.
        """
        kept = as_varying(instruction["keep"], [Axis.PP])
        arrived = [
            (lax.ppermute(x, Axis.PP, self.plan.hops.pairs[hop]), instruction[f"in_{hop}"])
            for hop in hops
        ]
        return arrived + [(x, kept)] * (most - len(hops))


@final
class ForwardPass(Ticks):
    """Forward operations, with caches for generation."""

    def start(self, caches: Mapping[str, Any]) -> Carry:
        """The carry before the first tick; caches: each stack's, or None."""
        layers = {
            kind.stack: self._varying(caches[kind.stack], run, kind.stack)
            for kind, run in zip(self.plan.kinds, self.functions.layers, strict=True)
        }
        return self.initial(layers=layers, total=zeros(self.head))

    def _varying(self, caches: Any, run: Callable, stack: str) -> Any:
        """A stack's caches, varying like those that `run`, a layer of it, returns."""
        params, inputs = self.example(stack)
        inputs = inputs._replace(cache=get(caches, self.first))
        _, result = jax.eval_shape(run, params, inputs, self.x)
        vary = partial(jax.tree.map, lambda x, like: as_varying(x, sorted(varying_axes(like))))
        return vary(caches, result)

    def compute(self, carry: Carry, instruction: Instruction) -> Carry:
        return run_if("forward", carry, instruction, self._forward)

    def _forward(self, carry: Carry, instruction: Instruction) -> Carry:
        """Embeds before the first part's layers, and runs the head after the last one's."""
        carry = run_if("embed", carry, instruction, self._embed)
        carry = self._layers(carry, instruction)
        return run_if("head", carry, instruction, self._head)

    def _layers(self, carry: Carry, instruction: Instruction) -> Carry:
        def run(carry: Carry, layer: CurrentLayer) -> Carry:
            params, row = self.gathered(layer.params), of_stack("row", layer.stack)
            cache = get(carry.layers[layer.stack], instruction[row] + layer.offset)
            inputs = layer.inputs._replace(cache=cache)
            x, cache = self.functions.layers[layer.kind](params, inputs, carry.x)
            caches = put(carry.layers[layer.stack], cache, instruction[row] + layer.offset)
            return carry._replace(x=x, layers=carry.layers | {layer.stack: caches})

        return self.each_layer("forward", carry, instruction, run)

    def _head(self, carry: Carry, instruction: Instruction) -> Carry:
        micro, _ = self.micro_batch(instruction["micro"])
        value = self.functions.head(self.arrays.ends, micro, carry.x)
        total = jax.tree.map(jnp.add, carry.total, value)
        return carry._replace(x=jax.tree.map(jnp.zeros_like, carry.x), total=total)
