"""Pipelined training, with any schedule and other parallelism, equals one device."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from one_device import case, hold, hold_in_a_process, report
from turns import latin, slow

from jaxptd.analysis.jaxprs import equations
from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.mesh import SCHEDULES, Layout, make_mesh
from jaxptd.models import stages
from jaxptd.params import shardings
from jaxptd.pipeline.schedules import DEFAULT_CHUNKS
from jaxptd.step import Program

FIVE = {"num_layers": 5, "dropout": 0.1}
MASKED = {"norm_order": "output", "family": "llama", "remat": "dots", "dropout": 0.1}
OTHER = FIVE | {"tie_embeddings": False, "documents": "apart"}  # the other kinds of models

RING_STEPS: dict[str, Any] = {"tp": 4, "sequence_parallel": True, "collective_matmul": True}

# A schedule without a name: the last micro-batch goes backward first.
LAST_FIRST = """\
F0,F1,F2,F3,,,B3,B2,B1,B0
,F0,F1,F2,F3,B3,B2,B1,B0
"""


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        # A tied table on three stages, over which nothing divides.
        case({"num_layers": 5}, 2, pp=3),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(OTHER | {"remat": "full"}, 4, pp=2, row=2, col=2, schedule="zb-v"),
        case(OTHER, 4, pp=2, dp=2, cp=2, schedule="interleaved"),
        case(FIVE, 4, pp=2, **RING_STEPS, schedule="zb-v"),
        case(OTHER, 2, pp=3, stage_layers=(0, 4, 1)),
        case(FIVE, 2, pp=2, dp=2),
        case(FIVE | {"remat": "attention"}, 4, pp=4, tp=2, schedule="zb-h1"),
        case(FIVE | {"remat": "dots"}, 1, pp=4, schedule="gpipe"),
        case(FIVE | {"remat": "full"}, 8, pp=2, tp=2, sequence_parallel=True),
        case(FIVE | {"remat": "dots"}, 4, pp=2, cp=4, ring="rsa", schedule="zb-h2"),
        case(FIVE, 2, pp=2, row=2, col=2, matmul2d="cannon"),
        case(FIVE | {"scan_layers": False}, 8, pp=5, schedule="zb-h1"),
        case(MASKED, 4, pp=2, tp=2, sequence_parallel=True, schedule="zb-h1"),
    ],
)
def test_more_steps_equal_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
def test_a_table_from_a_file_equals_one_device(tmp_path: Path) -> None:
    path = tmp_path / "last-first.csv"
    path.write_text(LAST_FIRST)
    hold(Layout(pp=2, schedule=str(path)), micro_batches=4, **FIVE)


def matrix() -> Iterator[Any]:
    """Every schedule with 2 to 8 stages on eight devices, and an odd number of layers."""
    layouts = ((2, {"dp": 4}), (2, {"tp": 4}), (4, {"dp": 2}), (4, {"tp": 2}), (8, {}))
    for schedule, (pp, others), times in latin(SCHEDULES, layouts, (1, 2, 4)):
        layers = pp * DEFAULT_CHUNKS.get(schedule, 1) + 1
        choice = {"num_layers": layers, "dropout": 0.1, "batch": 32}
        yield case(choice, times * pp, pp=pp, schedule=schedule, **others)


@pytest.mark.slow
def test_layers_in_the_wrong_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stages.rows_of_layers
    monkeypatch.setattr(stages, "rows_of_layers", lambda *given: found(*given)[::-1])
    assert report(Layout(pp=5), "float64", **FIVE).wrong


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), list(matrix()))
def test_every_schedule_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


INSIDE = [
    {"tp": 4, "sequence_parallel": True},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    RING_STEPS,
    *({"cp": 4, "ring": ring} for ring in ("blockwise", "rsa", "gather")),
    *({"row": 2, "col": 2, "matmul2d": kind} for kind in ("gather", "summa", "fox", "cannon")),
    {"row": 2, "col": 2, "attention2d": "blocks", "ring": "rsa"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "schedule", "remat"),
    latin(
        INSIDE,
        ("1f1b", "interleaved", "zb-h1", "zb-v"),
        ("none", "dots", "attention", "full"),
    ),
    ids=str,
)
def test_stages_with_every_other_parallelism_equal_one_device(schedule, inside, remat) -> None:
    hold(Layout(pp=2, schedule=schedule, **inside), remat=remat, micro_batches=4, **OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unrolled_layers_and_uneven_parts(schedule: str) -> None:
    """Unrolled layers need equal parts; uneven parts may have no layers."""
    parts = 2 * DEFAULT_CHUNKS.get(schedule, 1)
    layers = {"num_layers": 8, "dropout": 0.1, "micro_batches": 4}
    layout = Layout(pp=2, tp=2, schedule=schedule)
    hold(layout, scan_layers=False, **layers)
    sizes = (5, 0, 3, 0)[: parts - 1]
    given = (*sizes, 8 - sum(sizes))
    hold(dataclasses.replace(layout, stage_layers=given), **layers)
    if schedule == "interleaved":
        hold(dataclasses.replace(layout, virtual_stages=4), **layers)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_equals_one_device_too(schedule: str) -> None:
    layout = Layout(pp=2, tp=2, sequence_parallel=True, schedule=schedule)
    found = report(layout, "float32", micro_batches=4, **FIVE)
    assert found.wrong == []
    assert found.worst_gradient <= 1e-6


MORE_DEVICES = [
    ("pp=4 dp=2 tp=2 schedule=1f1b", 5),
    ("pp=2 dp=2 row=2 col=2 schedule=zb-v", 5),
    ("pp=8 cp=2 schedule=interleaved", 17),
    ("pp=16 schedule=zb-h2", 17),
    ("pp=4 dp=2 cp=2 tp=2 sequence_parallel=true schedule=zb-h1", 5),
    ("pp=8 dp=2 tp=2 schedule=interleaved", 17),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "layers"), MORE_DEVICES)
def test_sixteen_and_thirty_two_devices(layout: str, layers: int) -> None:
    hold_in_a_process(layout, num_layers=layers)


# ---- checkpoints, evaluation, precision -----------------------------------------------------

SPREAD = [
    Layout(pp=3, dp=2, stage_layers=(0, 4, 1)),
    Layout(pp=2, tp=2, schedule="zb-v"),
    Layout(pp=2, row=2, col=2, schedule="interleaved"),
]


def program(layout: Layout, **choice: Any) -> Program:
    return tiny.FromZeros(tiny.config(layout, **FIVE | choice), make_mesh(layout))


def numbers(target: Any) -> Any:
    """Arrays of these shapes and shardings, with random numbers."""
    leaves, tree = jax.tree.flatten(target)
    draw = np.random.default_rng(0)
    made = [jax.device_put(draw.normal(size=x.shape).astype(x.dtype), x.sharding) for x in leaves]
    return jax.tree.unflatten(tree, made)


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    """A state saved under one layout and restored under the next is equal to the last bit."""
    parts = Layout(pp=2, tp=2, schedule="interleaved")  # without padding, in another order
    layouts = (Layout(), parts, Layout(pp=3, dp=2, stage_layers=(0, 3, 1)))
    programs = [program(layout, num_layers=4) for layout in layouts]
    checkpoints = Checkpoints(tmp_path, keep=len(programs))
    state = numbers(abstract_canonical(programs[0]))
    expected = jax.tree.map(np.asarray, state)
    for step, one in enumerate(programs):
        held, laid = (
            from_canonical(one, state),
            one.resolved.blueprint.from_canonical(state["params"]),
        )
        jax.tree.map(np.testing.assert_array_equal, held["params"], laid)
        found = to_canonical(one, held)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        checkpoints.save(step, found, description={})
        state = checkpoints.restore(step, abstract_canonical(programs[step - 2]))
        jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.slow
def test_an_evaluation_equals_one_device() -> None:
    targets = np.where(np.arange(8) < np.arange(8)[:, None], -1, tiny.batch()["targets"])
    batch = {**tiny.batch(), "targets": targets}
    found = []
    state = jax.tree.map(np.asarray, numbers(abstract_canonical(program(Layout()))))
    for layout in (Layout(), *SPREAD):
        one = program(layout, micro_batches=4)
        params = jax.device_put(
            one.resolved.blueprint.from_canonical(state["params"]),
            shardings(one.infos, one.mesh),
        )
        sums = one.eval_step(params, one.place(batch))["cross_entropy"]
        found.append((float(sums["sum"]), int(sums["targets"])))
    assert found[0][1] == 36
    for loss, tokens in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert tokens == 36


@pytest.mark.parametrize("schedule", [slow("1f1b"), "zb-h1"])
def test_bfloat16_keeps_float32_masters_and_sums(schedule: str) -> None:
    """Ticks carry sums of gradients in float32 and activations in bfloat16."""
    one = program(Layout(pp=2, dp=2, schedule=schedule), dtype="bfloat16")
    kept = one.states.map(lambda x, _: x, one.abstract_state, lambda x: jnp.float32(0))
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype("float32")}
    jaxpr = one.train_step.trace(one.abstract_state, one.abstract_batch).jaxpr
    (ticks,) = (
        e
        for e in equations(jaxpr)
        if e.primitive.name == "scan" and e.params["length"] == one.resolved.plan.schedule.ticks
    )
    carried = [v.aval for v in ticks.outvars]
    held = {
        (info.stored_shape[0] // 2, *info.stored_shape[1:]) if info.stack else info.stored_shape
        for info in one.infos.values()
    }
    sums = [x.dtype for x in carried if x.shape in held]
    assert sums == [jnp.dtype("float32")] * len(one.infos)
    assert {x.dtype for x in carried if x.shape[1:] == (2, 8, 16)} == {jnp.dtype("bfloat16")}
