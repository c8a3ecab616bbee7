"""A small encoder-decoder as functions, for pipelines and on one device.

Its activations are a tree, its layers form two stacks, and both stacks read common parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contract import TOLERANCES, relative
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_varying, copy_to, reduce_from
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.placement import chunk_rows, rows_of_layers
from jaxptd.pipeline.plan import Plan
from jaxptd.pipeline.pools import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.schedules import make_schedule
from jaxptd.pipeline.training import gradients

BATCH, SOURCE, TARGET, WIDTH, HIDDEN, WORDS = 2, 3, 2, 4, 6, 7
COLUMN, ROW = P(Axis.PP, None, Axis.TP), P(Axis.PP, Axis.TP)
LAYERS = {
    "encoder": {"up": COLUMN, "down": ROW},
    "decoder": {"up": COLUMN, "cross": COLUMN, "down": ROW},
}
WHOLE = P()
X = tuple[Array, Array]  # source and target


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, and how many layers of each stack each part has."""

    schedule: str
    stages: int
    encoder: tuple[int, ...]
    decoder: tuple[int, ...]
    micro_batches: int = 5
    recompute: bool = False
    first: int | None = None
    unroll: bool = False
    tp: int = 1

    def __str__(self) -> str:
        name = "table" if self.schedule.endswith(".csv") else self.schedule
        sizes = ["+".join(map(str, each)) for each in (self.encoder, self.decoder)]
        more = [name for name in ("recompute", "first", "unroll") if getattr(self, name)]
        return " ".join([name, f"p{self.stages}", *sizes, *more, f"tp{self.tp}"])

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        return {"encoder": self.encoder, "decoder": self.decoder}

    @functools.cached_property
    def plan(self) -> Plan:
        schedule = make_schedule(
            self.schedule,
            stages=self.stages,
            micro_batches=self.micro_batches,
            virtual_stages=len(self.encoder) // self.stages,
        )
        return Plan(schedule, self.stacks, self.recompute, self.first)

    def rows(self, stack: str) -> np.ndarray:
        return np.array(rows_of_layers(self.plan.schedule, self.stacks[stack]))

    def held(self, layers: dict) -> dict:
        """Places layers in their rows; unused rows are NaN, because nothing may read them."""

        def one(stack: str, x: Array) -> Array:
            depth = chunk_rows(self.plan.schedule, self.stacks[stack])[-1]
            return (
                jnp.full((self.stages * depth, *x.shape[1:]), jnp.nan, x.dtype)
                .at[self.rows(stack)]
                .set(x)
            )

        return {s: {name: one(s, x) for name, x in layers[s].items()} for s in layers}


# ---- the model ----------------------------------------------------------------------------------


def make_arrays(case: Case) -> ModelArrays:
    """The model's arrays, with layers in order."""
    rng, m = np.random.default_rng(0), case.micro_batches

    def draw(*shape: int) -> Array:
        return jnp.asarray(0.5 * rng.standard_normal(shape))

    def stack(count: int, names: tuple[str, ...]) -> dict[str, Array]:
        shapes = {"up": (WIDTH, HIDDEN), "cross": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        return {name: draw(count, *shapes[name]) for name in names}

    layers = {s: stack(sum(sizes), tuple(LAYERS[s])) for s, sizes in case.stacks.items()}
    common = {"scale": draw(WIDTH), "last": draw(WIDTH), "bias": draw(HIDDEN, WIDTH)}
    micro = {
        "source": jnp.asarray(rng.integers(0, WORDS, (m, BATCH, SOURCE)), jnp.int32),
        "target": jnp.asarray(rng.integers(0, WORDS, (m, BATCH, TARGET)), jnp.int32),
        "wanted": draw(m, BATCH, TARGET, WORDS),
    }
    return ModelArrays(layers, {"table": draw(WORDS, WIDTH)}, micro, draw(1), common)


def token_info(micro: dict, shared: Array) -> Array:
    return shared


def embed(ends: dict, micro: dict, token_info: Array) -> X:
    return ends["table"][micro["source"]] * token_info, ends["table"][micro["target"]]


def feed(params: dict, inputs: LayerInputs, x: Array, more: Array | float, *, tp: bool) -> Array:
    h = (copy_to(x, Axis.TP) if tp else x) @ params["up"] + more
    y = jax.nn.gelu(h * jnp.cos(inputs.number + inputs.token_info)) @ params["down"]
    return x + (reduce_from(y, Axis.TP) if tp else y)


def encoder(both: tuple, inputs: LayerInputs, x: X, *, tp: bool = False) -> X:
    params, common = both
    source, target = x
    scaled = source * common["scale"] + jnp.tanh(source @ common["bias"].T) @ common["bias"]
    return feed(params, inputs, scaled, 0.0, tp=tp), target


def decoder(both: tuple, inputs: LayerInputs, x: X, *, tp: bool = False) -> X:
    params, common = both
    source, target = x
    seen = jnp.mean(jnp.sin(source * common["last"]), 1, keepdims=True)
    cross = (copy_to(seen, Axis.TP) if tp else seen) @ params["cross"]
    return source, feed(params, inputs, target * common["scale"], cross, tp=tp)


RUN = {"encoder": encoder, "decoder": decoder}


def head(ends: dict, micro: dict, x: X) -> Array:
    return jnp.sum((x[1] @ ends["table"].T - micro["wanted"]) ** 2)


def one_device_config(arrays: ModelArrays, last: Callable, run: Any = RUN) -> Any:
    """Sums the results of `last` over micro-batches, without a pipeline."""
    total = 0.0
    for i in range(len(arrays.micro["wanted"])):
        micro = jax.tree.map(lambda x, i=i: x[i], arrays.micro)
        where, number = token_info(micro, arrays.shared), 0
        x = embed(arrays.ends, micro, where)
        for stack in LAYERS:
            layers = arrays.layers[stack]
            for row in range(len(layers["up"])):
                params = jax.tree.map(lambda p, row=row: p[row], layers)
                x = run[stack]((params, arrays.common), LayerInputs(where, number), x)
                number += 1
        total = total + last(arrays.ends, micro, x)
    return total


@functools.cache
def expected(m: int, encoders: int, decoders: int) -> tuple[Array, tuple]:
    """The loss and the gradients of layers, ends and common parameters."""
    arrays = make_arrays(Case("", 1, (encoders,), (decoders,), m))

    def loss(layers: dict, ends: dict, common: dict) -> Array:
        return one_device_config(arrays._replace(layers=layers, ends=ends, common=common), head)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return run(arrays.layers, arrays.ends, arrays.common)


def step(case: Case) -> Callable:
    """A training step: arrays, with layers in rows -> loss, gradients of layers, ends, common."""
    plan = case.plan
    layers = [functools.partial(RUN[kind.stack], tp=True) for kind in plan.kinds]

    def share(ends: dict, micro: dict, x: X) -> tuple[Array, Array]:
        loss = head(ends, micro, x)
        return loss, loss

    functions = ModelFunctions(embed, layers, share, token_info, unroll=case.unroll)

    def body(arrays: ModelArrays) -> tuple:
        others = arrays.ends, arrays.common
        ends, common = jax.tree.map(lambda x: as_varying(x, [Axis.PP]), others)
        zeros = jax.tree.map(jnp.zeros_like, (arrays.layers, ends, common))
        arrays = arrays._replace(ends=ends, common=common, zeros=zeros)
        loss, layers, *others = gradients(functions, plan, arrays)
        return lax.psum(loss, Axis.PP), layers, *lax.psum(others, Axis.PP)

    ins = ModelArrays(LAYERS, WHOLE, WHOLE, WHOLE, WHOLE)
    outs = (WHOLE, LAYERS, WHOLE, WHOLE)
    mesh = make_mesh(Layout(pp=case.stages, tp=case.tp))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(ins,), out_specs=outs))


def hold(case: Case) -> None:
    with jax.enable_x64(True):
        arrays = make_arrays(case)
        m, encoders, decoders = case.micro_batches, sum(case.encoder), sum(case.decoder)
        want_loss, want = expected(m, encoders, decoders)
        loss, layers, *others = step(case)(arrays._replace(layers=case.held(arrays.layers)))
        for stack, each in layers.items():
            spare = np.setdiff1d(np.arange(len(each["up"])), case.rows(stack))
            assert not any(np.asarray(x)[spare].any() for x in each.values())
            layers[stack] = {name: x[case.rows(stack)] for name, x in each.items()}
    limit = TOLERANCES["float64"]
    assert relative(np.asarray(loss), np.asarray(want_loss)) <= limit
    found = dict(jax.tree_util.tree_leaves_with_path((layers, *others)))
    for path, wanted in jax.tree_util.tree_leaves_with_path(want):
        assert relative(np.asarray(found[path]), np.asarray(wanted)) <= limit, path
