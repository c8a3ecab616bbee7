"""Runs a plan: the ticks of any schedule in one `lax.scan`, inside a `shard_map`.

A tick is a row of loops, each of which runs as often as the plan says for this stage, mostly 0
times or once: embed, forward, head, backward, ... It is a row of loops and not one switch, because
XLA copies what the branches of a switch hand through, and gradients and all that is kept for
backward would be copied at every tick; what a loop carries stays where it is.

Results go on by permutes (`hops.py`), which all stages take or none does. A loop's body may hold
collectives over any axis but pp: the number of its trips is the same along those.

On every stage: `layers[rows, ...]`, its own; `ends`, all that is not a layer, whole.
Letters: M micro-batches, B, T, D of an activation `x[B, T, D]`.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.mesh import Axis
from jaxptd.pipeline.layer_kinds import Kind
from jaxptd.pipeline.model import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.plan import Plan, layers_scope
from jaxptd.pipeline.pools import Row, add, get, loop, put, zeros
from jaxptd.pipeline.split_backward import lean


class _Carry(NamedTuple):
    """What goes from tick to tick; x is the activation or gradient at work."""

    x: Array
    mail: Array
    saved: Any
    between: Any
    layers: Any  # their gradients, or in a forward pass their caches
    ends: Any
    total: Any


def gradients(functions: ModelFunctions, plan: Plan, arrays: ModelArrays) -> tuple[Array, Any, Any]:
    """(loss, gradients of layers, gradients of ends): this stage's shares, ends of the ends too."""
    run = _Training(functions, plan, arrays)
    carry = _scan(run, run.start(), run.tick)
    return carry.total, carry.layers, carry.ends


def forward(
    functions: ModelFunctions, plan: Plan, arrays: ModelArrays, caches: Any = None
) -> tuple[Any, Any]:
    """(sum of what the head makes: zeros but on the last part's stage, caches of the layers)."""
    run = _Pass(functions, plan, arrays)
    carry = _scan(run, run.start(caches), run.tick)
    return carry.total, carry.layers


class _Pass:
    """A forward pass; and what training has in common with it."""

    def __init__(self, functions: ModelFunctions, plan: Plan, arrays: ModelArrays) -> None:
        self.functions, self.plan, self.arrays = functions, plan, arrays
        self.first = as_varying(jnp.int32(0), [Axis.PP])
        micro, places = self.micro_batch(self.first)
        self.x = zeros(jax.eval_shape(functions.embed, arrays.ends, micro, places))
        self.total = zeros(jax.eval_shape(functions.head, arrays.ends, micro, self.x))

    @cached_property
    def example(self) -> tuple[Any, LayerInputs]:
        """Shapes of a layer's parameters, and its inputs."""

        def first() -> Any:
            return self.functions.gathered(get(self.arrays.layers, self.first))

        return jax.eval_shape(first), LayerInputs(self.micro_batch(self.first)[1], self.first)

    def micro_batch(self, number: Array) -> tuple[Any, Any]:
        """A micro-batch, and the places of its tokens."""
        micro = get(self.arrays.micro, number)
        return micro, self.functions.places(micro, self.arrays.shared)

    def start(self, caches: Any) -> _Carry:
        params, inputs = self.example
        inputs = inputs._replace(cache=get(caches, self.first))
        _, found = jax.eval_shape(self.functions.layers[0], params, inputs, self.x)
        vary = partial(jax.tree.map, lambda x, like: as_varying(x, sorted(varying_axes(like))))
        return self._carry(layers=vary(caches, found))

    def _carry(self, **others: Any) -> _Carry:
        mail = zeros(self.x, self.plan.slots["mail"])
        empty = {"saved": (), "between": (), "ends": ()}
        return _Carry(x=self.x, mail=mail, total=self.total, **{**empty, **others})

    def tick(self, carry: _Carry, row: Row) -> _Carry:
        carry = self._begin(carry, row)
        carry = loop("forward", carry, row, self._forward)
        return loop("head", carry, row, self._head)

    def _begin(self, carry: _Carry, row: Row) -> _Carry:
        carry = loop("embed", carry, row, self._embed)
        return carry._replace(x=get(carry.mail, row["read"]))

    def _embed(self, carry: _Carry, row: Row) -> _Carry:
        x = self.functions.embed(self.arrays.ends, *self.micro_batch(row["micro"]))
        return carry._replace(mail=put(carry.mail, x, row["read"]))

    def _forward(self, carry: _Carry, row: Row) -> _Carry:
        def one(carry: _Carry, own: Any, inputs: LayerInputs, at: Array, kind: int) -> _Carry:
            params, cache = self.functions.gathered(own), get(carry.layers, row["row"] + at)
            inputs = inputs._replace(cache=cache)
            x, cache = self.functions.layers[kind](params, inputs, carry.x)
            return carry._replace(x=x, layers=put(carry.layers, cache, row["row"] + at))

        return self._each_layer("forward", carry, row, one)

    def _head(self, carry: _Carry, row: Row) -> _Carry:
        micro, _ = self.micro_batch(row["micro"])
        value = self.functions.head(self.arrays.ends, micro, carry.x)
        return carry._replace(x=jnp.zeros_like(carry.x), total=carry.total + value)

    def _each_layer(
        self, name: str, carry: _Carry, row: Row, run: Callable, *, back: bool = False
    ) -> _Carry:
        """`run(carry, layer's row, inputs, number in the part, kind)` for each layer of a part."""
        _, places = self.micro_batch(row["micro"])

        def one(i: Any, carry: _Carry, kind: int, begin: Any, end: Any) -> _Carry:
            at = end - 1 - i if back else begin + i
            own = get(self.arrays.layers, row["row"] + at)
            return run(carry, own, LayerInputs(places, row["layer"] + at), at, kind)

        kinds = list(enumerate(self.plan.kinds))
        for kind, rows in reversed(kinds) if back else kinds:
            begin, end = rows if self.plan.even else (jnp.minimum(i, row["layers"]) for i in rows)
            body = partial(one, kind=kind, begin=begin, end=end)
            if self.functions.unroll and self.plan.even:
                for i in range(end - begin):
                    carry = body(i, carry)
                continue
            with jax.named_scope(layers_scope(name, kind)):
                carry = lax.fori_loop(0, end - begin, body, carry)
        return carry

    def finish(self, carry: _Carry, row: Row) -> _Carry:
        """Puts the result away, and sends it on."""
        carry = carry._replace(mail=put(carry.mail, carry.x, row["keep"]))
        for name, pairs in self.plan.hops.pairs.items():
            carry = loop(f"hop_{name}", carry, row, partial(self._hop, name=name, pairs=pairs))
        return carry

    def _hop(self, carry: _Carry, row: Row, *, name: str, pairs: Any) -> _Carry:
        arrived = lax.ppermute(get(carry.mail, row["keep"]), Axis.PP, pairs)
        return carry._replace(mail=put(carry.mail, arrived, row[f"in_{name}"]))


class _Training(_Pass):
    """Forward and backward."""

    def __init__(self, functions: ModelFunctions, plan: Plan, arrays: ModelArrays) -> None:
        super().__init__(functions, plan, arrays)
        split = bool(plan.slots["between"])
        self.kinds = [
            Kind.of(
                layer, self.example, self.x, number=number, begin=plan.kinds[number][0], split=split
            )
            for number, layer in enumerate(functions.layers)
        ]

    def start(self) -> _Carry:  # type: ignore[override]
        plan, (layers, ends) = self.plan, self.arrays.zeros
        pools = {
            name: [
                [zeros(shape, plan.slots[name], end - begin) for shape in kind.shapes[name]]
                for kind, (begin, end) in zip(self.kinds, plan.kinds, strict=True)
            ]
            for name in ("saved", "between")
        }
        return self._carry(**pools, layers=layers, ends=ends)

    def tick(self, carry: _Carry, row: Row) -> _Carry:
        carry = self._begin(carry, row)
        forward = self._run_on if self.plan.recompute else self._save
        carry = loop("forward", carry, row, forward)
        carry = loop("backward", carry, row, self._backward)
        return loop("weight", carry, row, self._weight) if self.plan.slots["between"] else carry

    # ---- forward --------------------------------------------------------------------------------

    def _run_on(self, carry: _Carry, row: Row) -> _Carry:
        """Layers of a part, nothing kept."""

        def one(carry: _Carry, own: Any, inputs: LayerInputs, at: Array, kind: int) -> _Carry:
            return carry._replace(
                x=self.functions.layers[kind](self.functions.gathered(own), inputs, carry.x)
            )

        return self._each_layer("forward", carry, row, one)

    def _save(self, carry: _Carry, row: Row, name: str = "forward") -> _Carry:
        """Layers of a part; what they keep for backward is saved."""

        def one(carry: _Carry, own: Any, inputs: LayerInputs, at: Array, kind: int) -> _Carry:
            x, kept = self.kinds[kind].layer.forward(self.functions.gathered(own), inputs, carry.x)
            saved = self.kinds[kind].put(carry.saved, kept, row["saved"], at)
            return carry._replace(x=x, saved=saved)

        return self._each_layer(name, carry, row, one)

    # ---- backward -------------------------------------------------------------------------------

    def _backward(self, carry: _Carry, row: Row) -> _Carry:
        """Head, layers and embedding; of the first and the last, stages that have them."""
        if self.plan.recompute:
            again = carry._replace(x=get(carry.mail, row["input"]))
            carry = self._save(again, row, "again")._replace(x=carry.x)
        carry = loop("head", carry, row, self._head)
        carry = self._each_layer("backward", carry, row, partial(self._back, row), back=True)
        return loop("unembed", carry, row, self._unembed)

    def _head(self, carry: _Carry, row: Row) -> _Carry:
        """The loss; x becomes its gradient."""
        micro, _ = self.micro_batch(row["micro"])

        def head(ends: Any, x: Array) -> Array:
            return self.functions.head(ends, micro, x)

        loss, vjp = jax.vjp(head, self.arrays.ends, carry.x)
        ends, x = vjp(jnp.ones_like(loss))
        ends = jax.tree.map(jnp.add, carry.ends, ends)
        return carry._replace(x=x, ends=ends, total=carry.total + loss)

    def _back(self, row: Row, carry: _Carry, *layer: Any) -> _Carry:
        """One layer: x, the gradient of its result, becomes that of its input."""
        own, inputs, at, number = layer
        kind, params = self.kinds[number], self.functions.regathered(own)
        kept = kind.get(carry.saved, row["saved"], at)
        if kind.halves:
            # Read before anything is laid over it, or XLA for CPUs copies the pool at every layer.
            for i in (i for i in kind.between.places if i is not None):
                kept[i] = lax.optimization_barrier(kept[i])
            x, passed = kind.halves.now((kept, params, inputs), carry.x)
            over, rest = kind.between.part(passed)
            saved = kind.put(carry.saved, over, row["saved"], at)
            between = kind.put(carry.between, rest, row["between"], at)
            return carry._replace(x=x, saved=saved, between=between)
        found, x = kind.layer.backward(kept, params, inputs, carry.x)
        found = self.functions.reduce_scattered(found, own)
        return carry._replace(x=x, layers=add(carry.layers, found, row["row"] + at))

    def _weight(self, carry: _Carry, row: Row) -> _Carry:
        """The other half of backward, of each layer by itself."""

        def one(carry: _Carry, own: Any, inputs: LayerInputs, at: Array, number: int) -> _Carry:
            kind = self.kinds[number]
            assert kind.halves is not None
            params = self.functions.gathered(own) if kind.reads_parameters else self.example[0]
            kept = kind.get(carry.saved, row["saved"], at)
            rest = kind.get(carry.between, row["between"], at)
            found = kind.halves.then((kept, params, inputs), kind.between.join(kept, rest))
            found = self.functions.reduce_scattered(found, own)
            return carry._replace(layers=add(carry.layers, found, row["row"] + at))

        return self._each_layer("weight", carry, row, one)

    def _unembed(self, carry: _Carry, row: Row) -> _Carry:
        micro, places = self.micro_batch(row["micro"])

        def back(ends: Any, x: Array) -> Any:
            return jax.vjp(lambda ends: self.functions.embed(ends, micro, places), ends)[1](x)[0]

        ends = lean(back, self.arrays.ends, carry.x)
        ends = jax.tree.map(jnp.add, carry.ends, ends)
        return carry._replace(x=jnp.zeros_like(carry.x), ends=ends)


# ---- ticks --------------------------------------------------------------------------------------


def _scan(run: _Pass, carry: _Carry, tick: Callable[[_Carry, Row], _Carry]) -> _Carry:
    """All ticks. A row holds this stage's numbers, and the hops', which all stages share."""
    stage = lax.axis_index(Axis.PP)
    shared = {f"hop_{name}": jnp.asarray(ticks) for name, ticks in run.plan.hops.taken.items()}
    columns = {name: jnp.asarray(column) for name, column in run.plan.columns.items()}

    def one(carry: _Carry, rows: tuple[Row, Row]) -> tuple[_Carry, None]:
        own, shared = rows
        row = {name: get(column, stage) for name, column in own.items()} | shared
        return run.finish(tick(carry, row), row), None

    return lax.scan(one, carry, (columns, shared))[0]
