"""Shards of a parameter: equal for any shape and sharding, and converted back bit for bit."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.mesh import ZERO_AXES, Axis, Layout, make_mesh
from jaxptd.params import ParamInfo
from jaxptd.zero.plan import ParamPlan
from jaxptd.zero.shards import ShardedInfo
from jaxptd.zero.zero import LazyParam, gathered, reduce_scattered


def numbers(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    """Random numbers, none of them 0."""
    return np.random.default_rng(seed).uniform(1, 2, shape).astype(np.float32)


def info(shape: tuple, held: tuple, *spec: Any, rows: tuple[int, ...] | None = None) -> ParamInfo:
    return ParamInfo(shape, held, spec, decay=True, stack="blocks" if rows else None, rows=rows)


def sharded(info: ParamInfo, layout: Layout, *, lead: int = 0) -> ShardedInfo:
    """A parameter of a state that replicas split, if there are any."""
    return ShardedInfo(info, layout.sizes, lead, (Axis.REPLICAS,) * (layout.replicas > 1))


# Rows for two stages of up to three layers; the second stage has two.
UNEVEN = info((5, 3, 7), (6, 3, 8), "pp", None, "tp", rows=(0, 1, 2, 3, 4))
FOLDED = info((5, 3, 7), (8, 3, 8), "pp", None, "tp", rows=(0, 6, 2, 3, 4))
CASES = [
    (sharded(info((7,), (7,), None), Layout(dp=4)), 2),
    (sharded(info((1,), (1,), None), Layout(ep=2, cp=3)), 1),
    (sharded(info((5, 3), (5, 3), None, None), Layout(dp=3)), 5),
    (sharded(info((13, 6), (16, 6), "tp", None), Layout(dp=2, tp=4)), 12),
    (sharded(info((3, 5, 7), (3, 6, 7), None, "tp", None), Layout(dp=3, tp=2)), 21),
    (sharded(info((7, 5), (8, 6), "row", "col"), Layout(dp=2, row=2, col=2)), 6),
    (sharded(info((7, 5), (8, 5), ("row", "col"), None), Layout(cp=2, row=2, col=2)), 5),
    (sharded(info((5, 7), (5, 8), None, ("col", "row")), Layout(dp=2, row=2, col=2)), 5),
    (sharded(info((6, 5), (6, 5), "pp", None), Layout(pp=2, ep=2, cp=2)), 4),
    (sharded(UNEVEN, Layout(pp=2, dp=2, tp=2)), 18),
    (sharded(UNEVEN, Layout(pp=2, dp=2, tp=2), lead=1), 6),
    (sharded(FOLDED, Layout(pp=2, dp=2, tp=2)), 24),
    (sharded(FOLDED, Layout(pp=2, cp=2, tp=2), lead=1), 6),
    (sharded(info((2, 5, 3), (2, 5, 3), None, None, None), Layout(dp=3, cp=2), lead=1), 3),
    (sharded(info((7, 5), (7, 5), None, None), Layout(dp=2, ep=2, ulysses=2)), 5),
    # Four experts in two layers: ZeRO uses what remains of the batch's axes.
    (sharded(info((2, 4, 5), (2, 4, 5), None, "ep", None), Layout(dp=2, ep=2, cp=2), lead=1), 3),
    (sharded(info((4, 5, 3), (4, 5, 4), "ep", None, "tp"), Layout(dp=2, ep=2, tp=2)), 10),
    (sharded(info((7, 5), (7, 6), None, "tp"), Layout(replicas=2, dp=2, tp=2)), 6),
    (sharded(info((2, 7, 3), (2, 7, 3), None, None, None), Layout(replicas=3, cp=2), lead=1), 4),
]
IDS = [f"{stored.shape} over {stored.spec}" for stored, _ in CASES]
TABLE = pytest.mark.parametrize(("stored", "size"), CASES, ids=IDS)


def shard_by_hand(stored: ShardedInfo, held: np.ndarray, at: dict[Axis, int]) -> np.ndarray:
    """The shard of the device at these coordinates, from the array that layers hold."""
    for dim, axes in enumerate(stored.info.axes_of_dims):
        for axis in axes:  # the first is the slowest
            held = np.split(held, stored.sizes[Axis(axis)], dim)[at[Axis(axis)]]
    rows = held.reshape(*held.shape[: stored.lead], -1)
    number, index = 1, 0
    for axis in left(stored):
        number *= stored.sizes[axis]
        index = index * stored.sizes[axis] + at[axis]
    length = math.ceil(rows.shape[-1] / number)
    shard = np.zeros((*rows.shape[:-1], length), held.dtype)
    found = rows[..., index * length : (index + 1) * length]
    shard[..., : found.shape[-1]] = found
    return shard


def left(stored: ShardedInfo) -> list[Axis]:
    """Axes of the batch over which layers do not shard the parameter; replicas are the fastest."""
    return [*(a for a in ZERO_AXES if a not in stored.info.axes), *stored.split]


@TABLE
def test_every_device_holds_its_shard(stored: ShardedInfo, size: int) -> None:
    """All shards have the same size, whatever the shape, and equal shards made by hand."""
    layout = Layout(**{axis.value: size for axis, size in stored.sizes.items()})
    mesh = make_mesh(layout)
    x = numbers(stored.shape)
    placed = jax.device_put(stored.from_canonical(x), NamedSharding(mesh, P(*stored.spec)))
    assert placed.shape == stored.stored_shape
    held = np.asarray(stored.info.from_canonical(x))
    assert stored.part_size == size
    for shard in placed.addressable_shards:
        place = np.argwhere(mesh.device_ids == shard.device.id)[0]
        want = shard_by_hand(stored, held, dict(zip(Axis, place, strict=True)))
        np.testing.assert_array_equal(shard.data, want)


SPLIT = [stored for stored, _ in CASES if stored.split]


@pytest.mark.parametrize("stored", SPLIT, ids=["along tp", "by layer"])
def test_parts_of_replicas_join_to_the_block_and_sums_of_gradients_are_dealt_out(
    stored: ShardedInfo,
) -> None:
    layout = Layout(**{axis.value: size for axis, size in stored.sizes.items()})
    mesh = make_mesh(layout)
    x = np.arange(math.prod(stored.shape), dtype=np.float32).reshape(stored.shape)
    replicas = layout.zero_shards * layout.replicas

    def there_and_back(part: jax.Array) -> jax.Array:
        block = stored.gather(stored.join(part, jnp.float32), jnp.float32)
        return stored.part_of_sum(stored.reduce_scatter(block)) / replicas

    spec = P(*stored.spec)
    run = jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=spec)
    placed = jax.device_put(stored.from_canonical(x), NamedSharding(mesh, spec))
    np.testing.assert_array_equal(stored.to_canonical(run(placed)), x)

    def blocks(part: jax.Array) -> jax.Array:
        block = stored.gather(stored.join(part, jnp.float32), jnp.float32)
        return lax.pmax(block, tuple(stored.holders))  # all devices have the same

    whole = jax.shard_map(blocks, mesh=mesh, in_specs=spec, out_specs=P(*stored.info.spec))(placed)
    np.testing.assert_array_equal(stored.info.to_canonical(whole), x)


@TABLE
def test_from_and_to_canonical_are_inverse(stored: ShardedInfo, size: int) -> None:
    x = numbers(stored.shape)
    there = stored.from_canonical(x)
    np.testing.assert_array_equal(stored.to_canonical(there), x)
    assert np.count_nonzero(there) == x.size  # the rest is padding
    inner = stored.info
    stacked = (inner.shape[0], *inner.stored_shape[1:])
    in_order = dataclasses.replace(inner, rows=None, stored_shape=stacked)
    made = np.asarray((in_order if inner.rows else inner).from_canonical(x))
    same = stored.from_stacked(jnp.asarray(made))
    np.testing.assert_array_equal(same, there)


@st.composite
def cuts(draw: st.DrawFn) -> ShardedInfo:
    """Draws up to three dims, sharded over any axes except dp and cp, padded or not; no devices."""
    size = st.integers(1, 3)
    sizes = {axis: draw(size) for axis in Axis}
    axes = draw(st.permutations(["pp", "ep", "row", "col", "tp"]))
    dims, spec, held, shape = draw(st.integers(1, 3)), [], [], []
    lead = draw(st.integers(0, min(1, dims - 1)))
    for _ in range(dims):
        count = draw(st.integers(0, min(2, len(axes))))
        chosen, axes = tuple(axes[:count]), axes[count:]
        spec.append(chosen if count > 1 else chosen[0] if chosen else None)
        held.append(math.prod(sizes[Axis(axis)] for axis in chosen) * draw(st.integers(1, 4)))
        shape.append(draw(st.integers(1, held[-1])))
    return ShardedInfo(info(tuple(shape), tuple(held), *spec), sizes, lead)


@pytest.mark.slow
@settings(max_examples=40)
@given(cuts())
def test_any_sharding_round_trips_with_less_padding_than_devices(stored: ShardedInfo) -> None:
    x = np.arange(1, 1 + math.prod(stored.shape), dtype=np.float32).reshape(stored.shape)
    there = np.asarray(stored.from_canonical(x))
    assert there.shape == stored.stored_shape
    np.testing.assert_array_equal(stored.to_canonical(there), x)
    number = math.prod(stored.sizes[axis] for axis in left(stored))
    assert 0 <= stored.padded_size - math.prod(stored.block_shape) < number
    assert stored.padded_size == number * stored.shard_size
    held = np.asarray(stored.info.from_canonical(x))
    shape = [stored.sizes[axis] for axis in Axis]
    over = [Axis(axis) for axes in stored.spec for axis in _tuple(axes)]
    for place in itertools.islice(np.ndindex(*shape), 0, None, 5):
        at = dict(zip(Axis, place, strict=True))
        want, found = shard_by_hand(stored, held, at), there
        for dim, axes in enumerate(stored.spec):
            for axis in _tuple(axes):
                found = np.split(found, stored.sizes[Axis(axis)], dim)[at[Axis(axis)]]
        np.testing.assert_array_equal(found, want)
    assert len(over) == len(set(over))
    assert {*over} == {Axis(axis) for axis in stored.axes}


def _tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


# ---- gather and reduce-scatter ------------------------------------------------------------------


def on_mesh(stored: ShardedInfo, body: Any, specs: tuple[Any, Any]) -> Any:
    layout = Layout(**{axis.value: size for axis, size in stored.sizes.items()})
    into, out = specs
    mesh = make_mesh(layout)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=out, check_vma=True))


@pytest.mark.parametrize("number", [slow(1), 6, slow(8), 10, slow(13), slow(14), 15])
def test_gathered_shards_are_the_block_and_gradients_are_reduce_scattered(number: int) -> None:
    """Every device along ZeRO's axes gets the same block, and its shard of the summed gradients."""
    stored, _ = CASES[number]
    every, axes = P(*left(stored), *stored.info.spec), tuple(range(len(left(stored))))
    x = numbers(stored.shape)

    def gather(shard: jax.Array) -> jax.Array:
        return jnp.expand_dims(stored.gather(shard, jnp.float32), axes)

    blocks = on_mesh(stored, gather, (P(*stored.spec), every))(stored.from_canonical(x))
    for each in np.asarray(blocks).reshape(-1, *stored.info.stored_shape):
        np.testing.assert_array_equal(each, stored.info.from_canonical(x))

    copies = [stored.sizes[axis] for axis in left(stored)]
    gradients = numbers((*copies, *stored.info.stored_shape), seed=2)

    def reduce_scatter(gradient: jax.Array) -> jax.Array:
        return stored.reduce_scatter(gradient.squeeze(axes))

    sums = on_mesh(stored, reduce_scatter, (every, P(*stored.spec)))(gradients)
    want = gradients.sum(axes, dtype=np.float64)
    found = np.asarray(stored._unflatten_all(sums))
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert np.count_nonzero(np.asarray(sums)) == want.size  # the padding stays zero


LAYER = Layout(dp=2, ep=2, tp=2)
ODD = sharded(info((2, 5, 2), (2, 5, 2), None, None, "tp", rows=(0, 1)), LAYER, lead=1)
SMALL = sharded(info((2, 3), (2, 3), None, None, rows=(0, 1)), LAYER, lead=1)
EXPERTS = sharded(info((2, 4, 3), (2, 4, 3), None, "ep", None, rows=(0, 1)), LAYER, lead=1)


def gatherable(shard: jax.Array, stored: ShardedInfo, dtype: Any) -> LazyParam:
    plan = ParamPlan(gather="layer", gather_dtype=dtype, reduce="each_layer")
    return LazyParam(shard, shard, None, stored, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layers_parameters_are_gathered_together_and_split_again(dtype: str) -> None:
    """Two parameters are alike; others are gathered in another precision or over other axes."""
    stored = {"odd": ODD, "small": SMALL, "more": ODD, "wide": ODD, "experts": EXPERTS}
    x = {name: numbers(each.shape, i) for i, (name, each) in enumerate(stored.items())}
    kinds = {name: "float32" if name == "wide" else dtype for name in stored}

    def body(shards: dict) -> dict:
        layer = {n: gatherable(p[1], stored[n], jnp.dtype(kinds[n])) for n, p in shards.items()}
        axes = {n: tuple(range(len(left(each)))) for n, each in stored.items()}
        return {n: jnp.expand_dims(block, axes[n]) for n, block in gathered(layer).items()}

    specs = {n: P(*each.spec) for n, each in stored.items()}
    out = {n: P(*left(each), *each.info.spec[1:]) for n, each in stored.items()}
    found = on_mesh(ODD, body, ((specs,), out))({n: stored[n].from_canonical(x[n]) for n in x})
    for name, blocks in found.items():
        assert blocks.dtype == kinds[name]
        for each in np.asarray(blocks).reshape(-1, *stored[name].shape[1:]):
            np.testing.assert_array_equal(each, x[name][1].astype(kinds[name]))


# bfloat16 rounds 1 + 2**-9 to 1, so a sum in it would lose the terms of three devices.
STEP = 2.0**-9


def test_gradients_of_parameters_gathered_in_bfloat16_are_summed_in_float32() -> None:
    stored = {"odd": ODD, "small": SMALL, "experts": EXPERTS}
    kinds = {n: jnp.dtype("float32" if n == "small" else "bfloat16") for n in stored}
    shapes = {n: each.shape[1:] for n, each in stored.items()}

    def body(shards: dict) -> dict:
        layer = {n: gatherable(p[0], stored[n], kinds[n]) for n, p in shards.items()}
        made = {}
        for n, block in gathered(layer).items():
            share = jnp.where(jax.lax.axis_index(left(stored[n])) == 0, 1.0, STEP)
            made[n] = jnp.zeros_like(block) + share.astype(block.dtype)
        found = reduce_scattered(made, layer)
        assert {n: g.dtype for n, g in found.items()} == dict.fromkeys(stored, jnp.float32)
        return {n: g[None] for n, g in found.items()}

    specs = {n: P(*each.spec) for n, each in stored.items()}
    held = {n: each.from_canonical(numbers(each.shape)) for n, each in stored.items()}
    found = on_mesh(ODD, body, ((specs,), specs))(held)
    for name, sums in found.items():
        one = np.asarray(sums).ravel()
        devices = math.prod(LAYER.sizes[axis] for axis in left(stored[name]))
        assert (one[one != 0] == 1 + (devices - 1) * STEP).all()
        assert np.count_nonzero(one) == math.prod(shapes[name])


# ---- in training --------------------------------------------------------------------------------

SIXTHS = Layout(dp=3, cp=2)  # six divides hardly any of the model's sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        dataclasses.replace(SIXTHS, zero=3),
        dataclasses.replace(SIXTHS, zero=1),
        Layout(pp=2, dp=3, stage_layers=(2, 1), zero=2),
    ],
    ids=str,
)
def test_padding_stays_zero_while_training(layout: Layout) -> None:
    """Padding of parameters and moments."""
    program = tiny.program(layout, batch=6, micro_batches=1, num_layers=3)
    batch = program.place({name: x[:6] for name, x in tiny.batch().items()})
    state = program.init_state()
    for _ in range(2):
        state, metrics = program.train_step(state, batch)
    assert np.isfinite(float(metrics["loss"]))
    padded = []

    def look(x: jax.Array, stored: Any) -> jax.Array:
        rows = np.asarray(x).reshape(-1, stored.padded_size)
        beyond = rows[:, math.prod(stored.block_shape) :]
        assert (beyond == 0).all(), stored.info
        # Canonical and back loses only padding, which includes rows without a layer.
        again = np.asarray(stored.from_canonical(stored.to_canonical(x)))
        np.testing.assert_array_equal(again, np.asarray(x))
        padded.append(beyond.size)
        return x

    program.states.map(look, state, lambda x: x)
    assert len(padded) == 3 * len(program.infos)
    assert sum(padded) > 0
