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
from jaxptd.pipeline.halves import Between, lean, trace_layer
from jaxptd.pipeline.model import Inputs, Parts
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import Row, add, get, loop, put, zeros


class _Carry(NamedTuple):
    """What goes from tick to tick; x is the activation or gradient at work."""

    x: Array
    mail: Array
    saved: Any
    between: Any
    layers: Any  # their gradients, or in a forward pass their states
    ends: Any
    total: Any


def gradients(parts: Parts, plan: Plan, inputs: Inputs) -> tuple[Array, Any, Any]:
    """(loss, gradients of layers, gradients of ends): this stage's shares, ends of the ends too."""
    run = _Training(parts, plan, inputs)
    carry = _scan(run, run.start(), run.tick)
    return carry.total, carry.layers, carry.ends


def forward(parts: Parts, plan: Plan, inputs: Inputs, states: Any = None) -> tuple[Any, Any]:
    """(sum of what the head makes: zeros but on the last part's stage, states of the layers)."""
    run = _Pass(parts, plan, inputs)
    carry = _scan(run, run.start(states), run.tick)
    return carry.total, carry.layers


class _Pass:
    """A forward pass; and what training has in common with it."""

    def __init__(self, parts: Parts, plan: Plan, inputs: Inputs) -> None:
        self.parts, self.plan, self.inputs = parts, plan, inputs
        self.first = as_varying(jnp.int32(0), [Axis.PP])
        self.x = zeros(jax.eval_shape(parts.embed, inputs.ends, self.given(self.first)))
        self.total = zeros(jax.eval_shape(parts.head, inputs.ends, self.given(self.first), self.x))

    @cached_property
    def had(self) -> tuple[Any, Any]:
        """Shapes of a layer's parameters, and what is given with them."""

        def first() -> Any:
            return self.parts.fetch(get(self.inputs.layers, self.first))

        return jax.eval_shape(first), (self.given(self.first), self.first)

    def given(self, micro: Array) -> tuple[Any, Any]:
        """What is given of a micro-batch."""
        return self.inputs.shared, get(self.inputs.micro, micro)

    def start(self, states: Any) -> _Carry:
        _, found = jax.eval_shape(self.parts.layer, *self.had, self.x, get(states, self.first))
        vary = partial(jax.tree.map, lambda x, like: as_varying(x, sorted(varying_axes(like))))
        return self._carry(layers=vary(states, found))

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
        x = self.parts.embed(self.inputs.ends, self.given(row["micro"]))
        return carry._replace(mail=put(carry.mail, x, row["read"]))

    def _forward(self, carry: _Carry, row: Row) -> _Carry:
        def one(carry: _Carry, own: Any, given: Any, at: Array) -> _Carry:
            state = get(carry.layers, row["row"] + at)
            x, state = self.parts.layer(self.parts.fetch(own), given, carry.x, state)
            return carry._replace(x=x, layers=put(carry.layers, state, row["row"] + at))

        return self._each_layer("forward", carry, row, one)

    def _head(self, carry: _Carry, row: Row) -> _Carry:
        value = self.parts.head(self.inputs.ends, self.given(row["micro"]), carry.x)
        return carry._replace(x=jnp.zeros_like(carry.x), total=carry.total + value)

    def _each_layer(
        self, name: str, carry: _Carry, row: Row, run: Callable, *, back: bool = False
    ) -> _Carry:
        """`run(carry, row of layers, given, number in the part)` for each layer of a part."""
        given = self.given(row["micro"])
        count = self.plan.depth if self.plan.even else row["layers"]

        def one(i: Any, carry: _Carry) -> _Carry:
            at = count - 1 - i if back else i
            own = get(self.inputs.layers, row["row"] + at)
            return run(carry, own, (given, row["layer"] + at), at)

        if self.parts.unroll and self.plan.even:
            for i in range(self.plan.depth):
                carry = one(i, carry)
            return carry
        with jax.named_scope(f"{name}_layers"):
            return lax.fori_loop(0, count, one, carry)

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

    def __init__(self, parts: Parts, plan: Plan, inputs: Inputs) -> None:
        super().__init__(parts, plan, inputs)
        self.layer, self.saved = trace_layer(parts.layer, *self.had, self.x)
        self.halves, self.between, self.needed = None, Between((), []), False
        if plan.slots["between"]:
            kept = [zeros(shape) for shape in self.saved]
            self.halves = self.layer.split(kept, *self.had, self.x)
            _, passed = jax.eval_shape(self.halves.now, (kept, *self.had), self.x)
            self.between = Between.over(self.saved, self.halves.needs, passed)
            count = len(jax.tree.leaves(self.had[0]))
            self.needed = any(self.halves.needs[len(kept) : len(kept) + count])

    def start(self) -> _Carry:  # type: ignore[override]
        plan, (layers, ends) = self.plan, self.inputs.zeros
        pools = {
            name: [zeros(shape, plan.slots[name], plan.depth) for shape in shapes]
            for name, shapes in (("saved", self.saved), ("between", self.between.shapes))
        }
        return self._carry(**pools, layers=layers, ends=ends)

    def tick(self, carry: _Carry, row: Row) -> _Carry:
        carry = self._begin(carry, row)
        forward = self._run_on if self.plan.recompute else self._save
        carry = loop("forward", carry, row, forward)
        carry = loop("backward", carry, row, self._backward)
        if self.halves:
            carry = loop("weight", carry, row, self._weight)
        return carry

    # ---- forward --------------------------------------------------------------------------------

    def _run_on(self, carry: _Carry, row: Row) -> _Carry:
        """Layers of a part, nothing kept."""

        def one(carry: _Carry, own: Any, given: Any, at: Array) -> _Carry:
            return carry._replace(x=self.parts.layer(self.parts.fetch(own), given, carry.x))

        return self._each_layer("forward", carry, row, one)

    def _save(self, carry: _Carry, row: Row, name: str = "forward") -> _Carry:
        """Layers of a part; what they keep for backward is saved."""

        def one(carry: _Carry, own: Any, given: Any, at: Array) -> _Carry:
            x, kept = self.layer.forward(self.parts.fetch(own), given, carry.x)
            return carry._replace(x=x, saved=put(carry.saved, kept, row["saved"], at))

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
        given = self.given(row["micro"])

        def head(ends: Any, x: Array) -> Array:
            return self.parts.head(ends, given, x)

        loss, vjp = jax.vjp(head, self.inputs.ends, carry.x)
        ends, x = vjp(jnp.ones_like(loss))
        ends = jax.tree.map(jnp.add, carry.ends, ends)
        return carry._replace(x=x, ends=ends, total=carry.total + loss)

    def _back(self, row: Row, carry: _Carry, own: Any, given: Any, at: Array) -> _Carry:
        """One layer: x, the gradient of its result, becomes that of its input."""
        params = self.parts.fetch(own)
        kept = get(carry.saved, row["saved"], at)
        if self.halves:
            # Read before anything is laid over it, or XLA for CPUs copies the pool at every layer.
            for i in (i for i in self.between.places if i is not None):
                kept[i] = lax.optimization_barrier(kept[i])
            x, passed = self.halves.now((kept, params, given), carry.x)
            over, rest = self.between.part(passed)
            saved = list(carry.saved)
            for i, each in over.items():
                saved[i] = put(saved[i], each, row["saved"], at)
            rest = put(carry.between, rest, row["between"], at)
            return carry._replace(x=x, saved=saved, between=rest)
        found, x = self.layer.backward(kept, params, given, carry.x)
        found = self.parts.home(found, own)
        return carry._replace(x=x, layers=add(carry.layers, found, row["row"] + at))

    def _weight(self, carry: _Carry, row: Row) -> _Carry:
        """The other half of backward, of each layer by itself."""
        assert self.halves is not None
        halves = self.halves

        def one(carry: _Carry, own: Any, given: Any, at: Array) -> _Carry:
            kept = get(carry.saved, row["saved"], at)
            passed = self.between.join(kept, get(carry.between, row["between"], at))
            params = self.parts.fetch(own) if self.needed else self.had[0]
            found = self.parts.home(halves.then((kept, params, given), passed), own)
            return carry._replace(layers=add(carry.layers, found, row["row"] + at))

        return self._each_layer("weight", carry, row, one)

    def _unembed(self, carry: _Carry, row: Row) -> _Carry:
        given = self.given(row["micro"])

        def back(ends: Any, x: Array) -> Any:
            return jax.vjp(lambda ends: self.parts.embed(ends, given), ends)[1](x)[0]

        ends = lean(back, self.inputs.ends, carry.x)
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
