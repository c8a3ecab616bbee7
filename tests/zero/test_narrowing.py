"""Gradients of layers in a loop are as narrow as their matmuls; others stay in float32."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.analysis.compiled_step import random_batch
from jaxptd.analysis.jaxprs import equations, scans, traced
from jaxptd.mesh import Layout
from jaxptd.params import ParamInfo
from jaxptd.step import Program
from jaxptd.zero import plan
from jaxptd.zero.plan import ParamPlan
from jaxptd.zero.zero import attached, grad_slots_of, with_grad_slot

BARRIER = "optimization_barrier"
THREE = {"num_layers": 3}
IN_LOOP = ParamPlan(accumulate="in_loop", gather_dtype="bfloat16")
NARROW: list[Any] = [
    (Layout(), {"remat": "dots"}),
    (Layout(dp=2, tp=2, sequence_parallel=True), {"remat": "full", "dtype": "float16"}),
    (Layout(), {"products": "fp8"}),
    slow(Layout(cp=2, tp=2), {"dropout": 0.1}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True), {"products": "fp8", "remat": "full"}),
    slow(Layout(), {**tiny.T5, "products": "fp8"}),
    slow(Layout(), {"family": "llama", "num_kv_heads": 2, "tie_embeddings": False}),
    slow(Layout(tp=4), {"family": "llama", "num_kv_heads": 2}),
    slow(Layout(dp=2), {**tiny.T5, "remat": "attention"}),
    slow(Layout(tp=2), {"family": "bert", "remat": "dots", "remat_layers": 1}),
    slow(Layout(dp=2, cp=2, ring="rsa"), {"dtype": "float16"}),
    slow(Layout(offload="activations"), {"remat": "dots"}),
    slow(Layout(dp=2), {"family": "swin-unet"}),
]
RING_STEPS = Layout(tp=2, sequence_parallel=True, collective_matmul=True)
WIDE: list[Any] = [
    (Layout(), {"dtype": "float32"}),
    (Layout(), {"scan_layers": False}),
    (Layout(pp=2), {"num_layers": 4}),
    (Layout(row=2, col=2), {}),
    (Layout(offload="optimizer"), {}),
    (Layout(dp=2, zero=1), {}),
]


def program(layout: Layout, **choice: Any) -> Program:
    sizes = {} if choice.get("family") == "swin-unet" else THREE
    one = {"dtype": "bfloat16", "micro_batches": 1}  # more add up in sums
    return tiny.program(layout, **one | sizes | choice)


def stacked(found: Program) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shape and precision of each array that a step's scans stack, per iteration."""
    for loop in scans(traced(found).jaxpr):
        of_trip = loop.params["jaxpr"].jaxpr.outvars
        for each, one in zip(loop.outvars, of_trip, strict=True):
            if each.aval.shape[1:] == one.aval.shape:
                yield one.aval.shape, one.aval.dtype.name


def matrices(found: Program) -> set[tuple[int, ...]]:
    """Shapes of a layer's matrices on a device."""
    sizes = found.config.layout.sizes

    def local(info: ParamInfo) -> tuple[int, ...]:
        cuts = [math.prod(sizes[axis] for axis in axes) for axes in info.axes_of_dims]
        return tuple(n // cut for n, cut in zip(info.stored_shape, cuts, strict=True))[1:]

    return {local(info) for info in found.infos.values() if info.stack and info.cast}


@pytest.mark.parametrize(("layout", "choice"), [*NARROW, slow(RING_STEPS, {})], ids=str)
def test_matrices_have_gradients_in_the_precision_of_products(layout: Layout, choice: dict) -> None:
    found = program(layout, **choice)
    dtype = found.config.model.dtype
    kinds = {kind for kind in stacked(found) if kind[0] in matrices(found)}
    assert kinds == {(shape, dtype) for shape in matrices(found)}


SEVERAL: list[Any] = [
    (Layout(), {"remat": "dots"}),
    (Layout(dp=2, zero=1), {"remat": "full", "micro_batches": 3}),
    slow(Layout(), {"dtype": "float32"}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True), {"dtype": "float16", "remat": "full"}),
    slow(Layout(dp=2, row=2, col=2, zero=1), {"micro_batches": 3}),
    slow(Layout(offload="optimizer"), {"remat": "full", "products": "fp8"}),
    slow(Layout(cp=2), {"family": "llama", "num_kv_heads": 2, "tie_embeddings": False}),
    slow(Layout(tp=2), {**tiny.T5, "remat": "attention", "dropout": 0.1}),
]


def several(layout: Layout, choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with several micro-batches, sized so that no activation has a matrix's shape."""
    choice = {"micro_batches": 2} | choice
    return choice | {"batch": 5 * layout.dp * choice["micro_batches"]}


@pytest.mark.parametrize(("layout", "choice"), SEVERAL, ids=str)
def test_several_micro_batches_stack_none(layout: Layout, choice: dict) -> None:
    found = program(layout, **several(layout, choice))
    assert found.resolved.zero.layers.accumulate == "in_loop"
    assert not matrices(found) & {shape for shape, _ in stacked(found)}


def test_loops_take_narrow_parameters_with_their_sums() -> None:
    """Parameters that no loop adds to, and only these, become float32 before they are read."""
    block = jnp.ones((2, 3), jnp.bfloat16)
    summed = with_grad_slot(block, IN_LOOP)
    alone = dataclasses.replace(summed, plan=ParamPlan("outside"))
    params = {"layers": summed, "table": alone}
    found = attached(params, grad_slots_of(params))
    assert found["layers"].grad_slot is summed.grad_slot
    assert found["table"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), SEVERAL, ids=str)
def test_their_sums_are_those_of_stacks(
    layout: Layout, choice: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = several(layout, choice)
    added = gradients(layout, choice)
    monkeypatch.setattr(plan, "_accumulate", lambda *_, **__: ("after", ""))
    for name, expected in gradients(layout, choice).items():
        np.testing.assert_array_equal(added[name], expected, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(), {"remat": "full", "remat_layers": 1}),
        (Layout(dp=2, zero=1), {}),
        (Layout(tp=2), {**tiny.T5, "remat": "none"}),
        slow(Layout(), {"scan_layers": False}),
        slow(Layout(pp=2), {"num_layers": 2}),
    ],
    ids=str,
)
def test_other_loops_do_not_add_to_sums(layout: Layout, choice: dict) -> None:
    """Covers layers in two loops, shared ones, and stage 1, where micro-batch 1 of 2 is the sum.

    In a pipeline, the tick that computes a layer's gradient adds it.
    """
    found = program(layout, **{"micro_batches": 2} | choice)
    expected = "in_tick" if layout.pp > 1 else "after"
    assert found.resolved.zero.layers.accumulate == expected


def test_a_layer_that_is_there_is_not_gathered_again() -> None:
    """Backward would otherwise begin with copies behind barriers."""
    found = program(Layout(), remat="full")
    barriers = [each for each in equations(traced(found).jaxpr) if each.primitive.name == BARRIER]
    shapes = {x.aval.shape for each in barriers for x in each.outvars}
    assert not shapes & matrices(found)


@pytest.mark.parametrize(("layout", "choice"), WIDE, ids=str)
def test_other_gradients_are_not_narrowed(layout: Layout, choice: dict) -> None:
    found = program(layout, **choice)
    assert not any(plan.narrows for plan in found.resolved.zero.plans.values())


def gradients(layout: Layout, choice: dict[str, Any]) -> dict[str, np.ndarray]:
    found = program(layout, **choice)
    batch = found.place(random_batch(found.config))
    state = tiny.FromZeros(found.config, found.mesh).init_state()
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(
        lambda x: jax.device_put(draw(0, 0.1, x.shape).astype(x.dtype), x.sharding), state["params"]
    )
    _, _, grads = found.step_with_gradients({**state, "params": params}, batch)
    return jax.tree.map(np.asarray, found.canonical(grads))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), NARROW, ids=str)
def test_nothing_is_rounded_that_was_not_before(
    layout: Layout, choice: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = gradients(layout, choice)
    monkeypatch.setattr(plan, "_narrows", lambda *_, **__: (False, ""))
    wide = gradients(layout, choice)
    assert narrow.keys() == wide.keys()
    for name, expected in wide.items():
        np.testing.assert_array_equal(narrow[name], expected, err_msg=name)


OUTSIDE: list[Any] = [
    (Layout(dp=2, zero=1), {}),
    (Layout(pp=2), {"num_layers": 2}),
    (Layout(pp=2, dp=2, zero=1), {"num_layers": 2}),
    (Layout(dp=2, zero=2), {"micro_batches": 1, "tie_embeddings": False}),
    (Layout(dp=2, tp=2, zero=3), {"family": "bert"}),
    (Layout(pp=2, dp=2, zero=3), {**tiny.T5, "num_layers": 2}),
    (Layout(pp=2, tp=2, schedule="zb-h1"), {"num_layers": 2, "dtype": "float16"}),
    (Layout(dp=2, row=2, col=2, zero=1), {"remat": "dots"}),
    (Layout(offload="parameters"), {"family": "llama", "num_kv_heads": 2}),
]


@pytest.mark.parametrize(("layout", "choice"), OUTSIDE, ids=str)
def test_tables_are_gathered_in_the_precision_of_what_reads_them(
    layout: Layout, choice: dict
) -> None:
    found = program(layout, **choice)
    tables = {name for name, info in found.infos.items() if info.cast and not info.stack}
    dtypes = {found.resolved.zero.plans[name].gather_dtype for name in tables}
    assert dtypes == {found.config.model.dtype}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), OUTSIDE, ids=str)
def test_outside_of_layers_only_what_is_read_is_narrow(
    layout: Layout, choice: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = gradients(layout, choice)
    wide_tables(monkeypatch)
    wide = gradients(layout, choice)
    for name, expected in wide.items():
        np.testing.assert_array_equal(narrow[name], expected, err_msg=name)


def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has parameters outside the layers gathered in float32."""
    outside = plan._outside
    monkeypatch.setattr(plan, "_outside", lambda config, narrow: outside(config, narrow=False))


@pytest.mark.slow
def test_a_sum_over_ring_steps_is_rounded_as_one_device_rounds_its_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = {"remat": "dots", "micro_batches": 1}
    narrow = gradients(RING_STEPS, choice)
    monkeypatch.setattr(plan, "_narrows", lambda *_, **__: (False, ""))
    wide = gradients(RING_STEPS, choice)
    for name, info in program(RING_STEPS).infos.items():
        dtype = "bfloat16" if info.cast and info.stack else "float32"
        expected = wide[name].astype(dtype).astype("float32")
        np.testing.assert_array_equal(narrow[name], expected, err_msg=name)
