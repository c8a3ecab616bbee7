"""A small model under every schedule against `jax.grad` on one device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TOLERANCES, relative
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from random_schedules import random_schedule
from turns import slow

from jaxptd.collectives import as_varying, copy_to, reduce_from
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.executor import forward
from jaxptd.pipeline.placement import chunk_rows, rows_of_layers
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule, to_csv
from jaxptd.pipeline.training import gradients

BATCH, WIDTH, HIDDEN, WORDS = 3, 4, 6, 7
LAYERS = {"a": P(Axis.PP, None, Axis.TP), "b": P(Axis.PP, Axis.TP)}
WHOLE = P()


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, and the sizes of the model that it runs."""

    schedule: str
    stages: int
    micro_batches: int
    sizes: tuple[int, ...]
    recompute: bool = False
    unroll: bool = False
    tp: int = 1

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.sizes))
        more = ["recompute"] * self.recompute + ["unrolled"] * self.unroll + ["tp"] * (self.tp > 1)
        name = "table" if self.schedule.endswith(".csv") else self.schedule
        return " ".join([name, f"p{self.stages}", f"m{self.micro_batches}", sizes, *more])

    @property
    def plan(self) -> Plan:
        sizes = {"stages": self.stages, "micro_batches": self.micro_batches}
        schedule = make_schedule(self.schedule, **sizes, virtual_stages=self.chunks)
        return Plan(schedule, {"blocks": self.sizes}, self.recompute)

    @property
    def chunks(self) -> int:
        return len(self.sizes) // self.stages

    @property
    def rows(self) -> np.ndarray:
        return np.array(rows_of_layers(self.plan.schedule, self.sizes))

    @property
    def depth(self) -> int:
        return self.stages * chunk_rows(self.plan.schedule, self.sizes)[-1]

    @property
    def mesh(self) -> Mesh:
        return make_mesh(Layout(pp=self.stages, tp=self.tp))

    def held(self, layers: dict[str, Array]) -> dict[str, Array]:
        """Places layers in their rows; unused rows are NaN, because nothing may read them."""
        return {
            name: jnp.full((self.depth, *x.shape[1:]), jnp.nan, x.dtype).at[self.rows].set(x)
            for name, x in layers.items()
        }


# ---- the model ----------------------------------------------------------------------------------


def make_arrays(case: Case) -> ModelArrays:
    """The model's arrays, with layers in order."""
    rng, m = np.random.default_rng(0), case.micro_batches

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape))

    layers = {"a": draw(sum(case.sizes), WIDTH, HIDDEN), "b": draw(sum(case.sizes), HIDDEN, WIDTH)}
    ends = {"table": draw(WORDS, WIDTH), "bias": draw(WORDS)}
    tokens = jnp.asarray(rng.integers(0, WORDS, (m, BATCH)), jnp.int32)
    micro = {"tokens": tokens, "scale": draw(m), "wanted": draw(m, BATCH, WORDS)}
    return ModelArrays(layers, ends, micro, draw(HIDDEN))


def token_info(micro: dict, shared: Array) -> tuple[Array, Array]:
    return shared, micro["scale"]


def embed(ends: dict, micro: dict, token_info: tuple[Array, Array]) -> Array:
    return ends["table"][micro["tokens"]] * token_info[0][0]


def layer(both: tuple, inputs: LayerInputs, x: Array, *, tp: bool = False) -> Array:
    """A layer that depends on its number, the micro-batch and what micro-batches share."""
    params, _ = both
    shared, each = inputs.token_info
    scale = jnp.cos(shared[1] * each + inputs.number)
    h = (copy_to(x, Axis.TP) if tp else x) @ params["a"]
    y = jax.nn.gelu(h * scale) @ params["b"]
    return x + (reduce_from(y, Axis.TP) if tp else y)


def head(ends: dict, micro: dict, x: Array) -> Array:
    """An output layer with tied embeddings."""
    return jnp.sum((x @ ends["table"].T + ends["bias"] - micro["wanted"]) ** 2)


def one_device_config(arrays: ModelArrays, through: Callable, last: Callable) -> Any:
    """Sums the results of `last` over micro-batches, without a pipeline."""
    total = 0.0
    for i in range(len(arrays.micro["scale"])):
        micro = jax.tree.map(lambda x, i=i: x[i], arrays.micro)
        where = token_info(micro, arrays.shared)
        x = embed(arrays.ends, micro, where)
        for number in range(len(arrays.layers["a"])):
            params = jax.tree.map(lambda p, number=number: p[number], arrays.layers)
            x = through((params, ()), LayerInputs(where, number), x)
        total = total + last(arrays.ends, micro, x)
    return total


@functools.cache
def expected(m: int, layers: int) -> tuple[Array, dict, dict]:
    """The loss and the gradients on one device, without a schedule."""
    arrays = make_arrays(Case("", 1, m, (layers,)))

    def loss(layers: dict, ends: dict) -> Array:
        return one_device_config(arrays._replace(layers=layers, ends=ends), layer, head)

    value, (layers_grad, ends_grad) = jax.jit(jax.value_and_grad(loss, (0, 1)))(
        arrays.layers, arrays.ends
    )
    return value, layers_grad, ends_grad


def step(case: Case) -> Callable:
    """A training step: arrays, with layers in rows -> loss, gradients of layers and ends."""
    plan = case.plan
    through = functools.partial(layer, tp=True)

    def share(ends: dict, micro: dict, x: Array) -> tuple[Array, dict[str, Array]]:
        loss = head(ends, micro, x)
        return loss, {"loss": loss}

    functions = ModelFunctions(embed, [through], share, token_info, unroll=case.unroll)

    def body(arrays: ModelArrays) -> tuple:
        ends = jax.tree.map(lambda x: as_varying(x, [Axis.PP]), arrays.ends)
        layers = {"blocks": arrays.layers}
        zeros = jax.tree.map(jnp.zeros_like, (layers, ends, ()))
        arrays = arrays._replace(layers=layers, ends=ends, zeros=zeros)
        terms, layers, ends, _ = gradients(functions, plan, arrays)
        return lax.psum(terms["loss"], Axis.PP), layers["blocks"], lax.psum(ends, Axis.PP)

    ins = ModelArrays(LAYERS, WHOLE, WHOLE, WHOLE)
    outs = (WHOLE, LAYERS, WHOLE)
    return jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=(ins,), out_specs=outs))


def hold(case: Case) -> None:
    with jax.enable_x64(True):
        arrays = make_arrays(case)
        want_loss, want_layers, want_ends = expected(case.micro_batches, sum(case.sizes))
        loss, layers, ends = step(case)(arrays._replace(layers=case.held(arrays.layers)))
    limit = TOLERANCES["float64"]
    assert relative(np.asarray(loss), np.asarray(want_loss)) <= limit
    spare = np.setdiff1d(np.arange(len(layers["a"])), case.rows)
    for name, found in layers.items():
        assert found.dtype == np.float64
        assert relative(np.asarray(found)[case.rows], np.asarray(want_layers[name])) <= limit, name
        assert not np.asarray(found)[spare].any()
    for name, found in ends.items():
        assert relative(np.asarray(found), np.asarray(want_ends[name])) <= limit, name


# ---- values and gradients -----------------------------------------------------------------------

CASES = [
    Case("gpipe", 4, 5, (1, 1, 1, 1)),
    Case("1f1b", 4, 5, (1, 1, 2, 0), tp=2),  # a part without layers
    Case("interleaved", 3, 5, (1, 0, 1, 1, 0, 1), recompute=True),
    Case("zb-v", 4, 5, (1, 0) * 4, recompute=True),
]
MORE = [
    Case("zb-h1", 2, 5, (2, 2), recompute=True, unroll=True),
    Case("1f1b", 4, 2, (1, 0, 2, 1)),  # fewer micro-batches than stages
    Case("interleaved", 4, 5, (0, 1) * 4, tp=2),
    Case("zb-h1", 4, 2, (1, 1, 2, 0), tp=2),
    Case("zb-h2", 4, 5, (1, 1, 1, 1)),
    Case("gpipe", 1, 2, (4,)),
    Case("1f1b", 2, 5, (3, 1)),
    Case("1f1b", 3, 5, (1, 2, 1), recompute=True),
    Case("1f1b", 8, 5, (1, 0) * 4),
    Case("interleaved", 2, 5, (1, 1, 1, 1), unroll=True),
    Case("zb-h1", 1, 2, (4,)),
    Case("zb-h1", 3, 5, (1, 2, 1)),
    Case("zb-v", 2, 5, (1, 2, 1, 0)),
]


def test_every_schedule_has_its_case() -> None:
    assert {case.schedule for case in (*CASES, *MORE)} == set(SCHEDULES)


@pytest.mark.parametrize("case", [*CASES, *map(slow, MORE)], ids=str)
def test_gradients_are_those_of_one_device(case: Case) -> None:
    hold(case)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "splits"), [(57, False), (173, True)])
def test_gradients_of_a_random_table_too(seed: int, splits: bool, tmp_path: Any) -> None:
    """Covers tables with two hops in a tick."""
    schedule = random_schedule(seed)
    path = tmp_path / "table.csv"
    path.write_text(to_csv(schedule))
    sizes = tuple(int(part < 4) for part in range(schedule.parts))
    case = Case(str(path), schedule.stages, schedule.micro_batches, sizes)
    assert schedule.splits == splits
    assert any(len(case.plan.hops.at(tick)) == 2 for tick in range(schedule.ticks))
    hold(case)


# ---- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "only"),
    [
        slow(Case("1f1b", 3, 4, (1, 2, 1)), None),
        (Case("zb-v", 2, 3, (1, 0, 2, 1), tp=2), 1),
        slow(Case("interleaved", 2, 2, (1, 1, 1, 1), unroll=True), None),
    ],
    ids=str,
)
def test_a_forward_pass_with_caches(case: Case, only: int | None) -> None:
    """A layer's cache sums its x; the head's results, here arrays, are summed."""
    plan = case.plan.forward_only(only)
    spec = P(Axis.PP)

    def through(params: tuple, inputs: LayerInputs, x: Array) -> tuple[Array, Array]:
        return layer(params, inputs, x, tp=True), inputs.cache + x

    def last(ends: dict, micro: dict, x: Array) -> Array:
        return x @ ends["table"].T

    def body(arrays: ModelArrays, caches: Array) -> tuple[Array, Array]:
        functions = ModelFunctions(embed, [through], last, token_info, unroll=case.unroll)
        arrays = arrays._replace(layers={"blocks": arrays.layers})
        total, found = forward(functions, plan, arrays, {"blocks": caches})
        return lax.psum(total, Axis.PP), found["blocks"]

    def record(params: tuple, inputs: LayerInputs, x: Array) -> Array:
        seen[inputs.number] = seen.get(inputs.number, 0.0) + x
        return layer(params, inputs, x)

    ins = (ModelArrays(LAYERS, WHOLE, WHOLE, WHOLE), spec)
    run = jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=ins, out_specs=(WHOLE, spec)))
    seen: dict[int, Array] = {}
    with jax.enable_x64(True):
        arrays = make_arrays(case)
        begun = jnp.arange(float(case.depth))[:, None, None]
        caches = jnp.broadcast_to(begun, (len(begun), BATCH, WIDTH))
        total, caches = run(arrays._replace(layers=case.held(arrays.layers)), caches)
        few = jax.tree.map(lambda x: x[:only], arrays.micro)
        want = one_device_config(arrays._replace(micro=few), record, last)
    limit = TOLERANCES["float64"]
    assert relative(np.asarray(total), np.asarray(want)) <= limit
    rows = case.rows
    for number, x in seen.items():
        found = np.asarray(caches)[rows[number]] - rows[number]
        assert relative(found, np.asarray(x)) <= limit
    spare = np.setdiff1d(np.arange(len(begun)), rows)
    np.testing.assert_array_equal(np.asarray(caches)[spare][:, 0, 0], spare)
