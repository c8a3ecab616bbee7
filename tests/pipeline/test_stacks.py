"""Two stacks, a tree of activations and common parameters, under every schedule."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import TOLERANCES, relative
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from random_schedules import random_schedule
from toys.encoder_decoder import (
    BATCH,
    LAYERS,
    RUN,
    SOURCE,
    TARGET,
    WHOLE,
    WIDTH,
    Case,
    X,
    embed,
    head,
    hold,
    make_arrays,
    one_device_config,
    step,
    token_info,
)
from turns import slow

from jaxptd.analysis.jaxprs import equations
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.executor import forward
from jaxptd.pipeline.placement import of_stack
from jaxptd.pipeline.pools import LayerInputs, ModelArrays, ModelFunctions
from jaxptd.pipeline.schedules import SCHEDULES, to_csv
from jaxptd.pipeline.split_backward import trace_layer

# ---- values and gradients -----------------------------------------------------------------------

CASES = [
    Case("interleaved", 2, (2, 1, 0, 0), (0, 0, 1, 2)),
    Case("zb-v", 2, (2, 1, 0, 0), (0, 0, 1, 2), tp=2),
    Case("1f1b", 2, (2, 1), (0, 2), recompute=True),  # a part with layers of both
]
MORE = [
    Case("gpipe", 1, (3,), (3,), unroll=True),
    Case("gpipe", 3, (2, 1, 0), (0, 1, 2)),
    Case("1f1b", 4, (1, 2, 0, 0), (0, 0, 2, 1), tp=2),
    Case("1f1b", 2, (3, 0), (1, 2), first=1),
    Case("interleaved", 2, (1, 0, 1, 1), (0, 0, 0, 3), recompute=True),
    Case("interleaved", 4, (1, 1, 0, 1, 0, 0, 0, 0), (0, 0, 0, 0, 1, 0, 1, 1)),
    Case("zb-h1", 3, (2, 1, 0), (0, 1, 2), tp=2),
    Case("zb-h1", 2, (2, 1), (0, 3), first=1),
    Case("zb-h1", 2, (3, 0), (0, 3), recompute=True),
    Case("zb-h2", 4, (1, 2, 0, 0), (0, 0, 2, 1)),
    Case("zb-v", 4, (1, 0, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 2, 0, 1, 0)),
    Case("zb-v", 2, (2, 1, 0, 0), (0, 0, 1, 2), recompute=True, first=1),
]


def test_every_schedule_has_its_case() -> None:
    assert {case.schedule for case in (*CASES, *MORE)} == set(SCHEDULES)


@pytest.mark.parametrize("case", [*map(slow, CASES[:2]), CASES[2], *map(slow, MORE)], ids=str)
def test_gradients_are_those_of_one_device(case: Case) -> None:
    hold(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [57, 173])
def test_gradients_of_a_random_table_too(seed: int, tmp_path: Path) -> None:
    schedule, path = random_schedule(seed), tmp_path / "table.csv"
    path.write_text(to_csv(schedule))
    half = schedule.parts // 2
    sizes = [
        tuple(int((part < half) == first) for part in range(schedule.parts)) for first in (1, 0)
    ]
    hold(Case(str(path), schedule.stages, *sizes, schedule.micro_batches))


# ---- memory -------------------------------------------------------------------------------------


def numbers(shapes: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def kept(arrays: ModelArrays, stack: str, x: X) -> int:
    """Number of elements that a layer saves for backward."""
    row = jax.tree.map(lambda p: p[0], arrays.layers[stack])
    inputs = LayerInputs(arrays.shared, jnp.int32(0))
    return numbers(trace_layer(RUN[stack], (row, arrays.common), inputs, x)[1])


@pytest.mark.parametrize(
    ("case", "slots"),
    [
        slow(CASES[0], {"mail": 3, "saved_encoder": 4, "saved_decoder": 2}),
        (CASES[2], {"saved_encoder": 1, "saved_decoder": 1}),
        (Case("1f1b", 4, (1, 2, 0, 0), (0, 0, 2, 1)), {"saved_encoder": 4, "saved_decoder": 2}),
    ],
    ids=str,
)
def test_each_stack_has_slots_of_its_own(case: Case, slots: dict[str, int]) -> None:
    """Ticks carry, for each stack, slots x rows of a part x what a layer saves."""
    assert slots.items() <= case.plan.slots.items()
    with jax.enable_x64(True):
        arrays = make_arrays(case)
        micro = jax.tree.map(lambda x: x[0], arrays.micro)
        x = embed(arrays.ends, micro, token_info(micro, arrays.shared))
        pools = {stack: max(sizes) * kept(arrays, stack, x) for stack, sizes in case.stacks.items()}
        held = case.held(arrays.layers)
        jaxpr = step(case).trace(arrays._replace(layers=held)).jaxpr
    scans = (e for e in equations(jaxpr) if e.primitive.name == "scan")
    (ticks,) = (e for e in scans if e.params["length"] == case.plan.schedule.ticks)
    rows = numbers(held) // case.stages
    others = 1 + rows + numbers((arrays.ends, arrays.common))  # the loss and the gradients
    waiting = (1 + case.plan.slots["mail"]) * numbers(x)
    saved = sum(case.plan.slots[of_stack("saved", stack)] * each for stack, each in pools.items())
    assert numbers([var.aval for var in ticks.outvars]) == waiting + saved + others


# ---- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[0], slow(CASES[1]), slow(CASES[2])], ids=str)
def test_a_forward_pass_with_caches_of_each_stack(case: Case) -> None:
    """An encoder's cache sums its sources, a decoder's its targets."""
    plan, spec = case.plan.forward_only(), P(Axis.PP)
    of_x = {"encoder": 0, "decoder": 1}

    def through(stack: str, both: tuple, inputs: LayerInputs, x: X) -> tuple[X, Array]:
        return RUN[stack](both, inputs, x, tp=True), inputs.cache + x[of_x[stack]]

    def body(arrays: ModelArrays, caches: dict) -> tuple[Array, dict]:
        layers = [functools.partial(through, stack) for stack in plan.stacks]
        total, caches = forward(
            ModelFunctions(embed, layers, head, token_info), plan, arrays, caches
        )
        return lax.psum(total, Axis.PP), caches

    def record(stack: str, both: tuple, inputs: LayerInputs, x: X) -> X:
        seen[stack, inputs.number] = seen.get((stack, inputs.number), 0.0) + x[of_x[stack]]
        return RUN[stack](both, inputs, x)

    ins = (ModelArrays(LAYERS, WHOLE, WHOLE, WHOLE, WHOLE), spec)
    mesh = make_mesh(Layout(pp=case.stages, tp=case.tp))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=(WHOLE, spec)))
    seen: dict[tuple[str, int], Array] = {}
    with jax.enable_x64(True):
        arrays = make_arrays(case)
        held, lengths = case.held(arrays.layers), {"encoder": SOURCE, "decoder": TARGET}
        empty = {s: jnp.zeros((len(held[s]["up"]), BATCH, n, WIDTH)) for s, n in lengths.items()}
        total, caches = run(arrays._replace(layers=held), empty)
        recorded = {stack: functools.partial(record, stack) for stack in RUN}
        want = one_device_config(arrays, head, recorded)
    limit = TOLERANCES["float64"]
    assert relative(np.asarray(total), np.asarray(want)) <= limit
    wanted = {s: [x for (each, _), x in sorted(seen.items()) if each == s] for s in lengths}
    for stack, found in caches.items():
        rows = np.asarray(found)[case.rows(stack)]
        assert relative(rows, np.asarray(wanted[stack])) <= limit
        assert not np.delete(np.asarray(found), case.rows(stack), 0).any()
