"""ZeRO at every stage, with other parallelism, trains, evaluates and generates like one device.

See test_costs.py for communication and memory, test_prefetching.py for the default tests' steps.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from one_device import case, hold, hold_in_a_process, report
from turns import latin

from jaxptd.errors import UserError
from jaxptd.generate import Generator, Sampling
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import shardings
from jaxptd.step import Program

# Three layers do not divide evenly over two stages; a batch of twelve divides over three devices.
THREE = {"num_layers": 3, "dropout": 0.1, "batch": 12}
FULL = THREE | {"remat": "full"}
UNROLLED = THREE | {"scan_layers": False}


# ---- one step -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(FULL, 2, ep=2, cp=2, tp=2, zero=2),
        case(FULL, 1, replicas=2, dp=2, cp=2, zero=2),
        case(THREE, 3, replicas=2, dp=2, tp=2, zero=1),
        case(THREE, 2, replicas=2, pp=2, dp=2, zero=3),
        case(UNROLLED, 1, replicas=2, dp=3, zero=3),
        case(THREE, 3, replicas=2, dp=2, tp=2, zero=3, replica_state="split"),
        case(FULL, 1, replicas=3, dp=2, zero=1, replica_state="split"),
        case(UNROLLED, 2, replicas=2, pp=2, cp=2, zero=2, replica_state="split"),
        case(THREE, 2, dp=3, cp=2, zero=3),  # six divides hardly any size
        # W, the later half of backward, reads parameters and gathers them once more.
        case(THREE | {"remat": "dots"}, 2, pp=2, dp=2, schedule="zb-h1", zero=3),
        case(THREE, 2, dp=2, tp=4, sequence_parallel=True, zero=1),
        case(UNROLLED | {"remat": "full"}, 2, dp=2, row=2, col=2, zero=2),
        case(UNROLLED | {"remat": "full"}, 2, dp=2, row=2, col=2, zero=3),
        case(UNROLLED, 2, dp=3, zero=2),
        case(THREE, 2, pp=3, dp=2, zero=2),
        case(FULL, 2, pp=2, ep=2, cp=2, zero=3),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


def test_with_a_state_that_replicas_split_a_step_equals_one_device() -> None:
    layout = Layout(replicas=2, dp=2, zero=3, replica_state="split")
    hold(layout, num_layers=2, micro_batches=2)


INSIDE = [
    {"dp": 2, "ep": 4},
    {"dp": 2, "tp": 4},
    {"dp": 4, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "row": 2, "col": 2},
    {"cp": 2, "row": 2, "col": 2, "matmul2d": "cannon"},
    {"cp": 4, "ring": "rsa"},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 4},
    {"pp": 2, "ep": 2, "cp": 2},
    {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
    {"pp": 2, "dp": 1, "cp": 2, "schedule": "zb-v"},
    {"pp": 2, "dp": 1, "cp": 2, "row": 1, "col": 2, "schedule": "interleaved"},
    {"pp": 4, "dp": 2, "schedule": "gpipe"},
    {"pp": 3, "dp": 2},
]
WAYS = [{"remat": "none"}, {"remat": "dots"}, {"remat": "attention"}, {"remat": "full"}]
WAYS += [{"remat": "none", "scan_layers": False}, {"remat": "full", "scan_layers": False}]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("inside", INSIDE[:10:3], ids=str)
def test_every_stage_of_another_model(inside: dict, stage: int) -> None:
    choice = THREE | {"batch": 16, "tie_embeddings": False, "documents": "apart"}
    hold(Layout(zero=stage, **inside), micro_batches=2, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "how", "stage"), latin(INSIDE, WAYS, (1, 2, 3)), ids=str)
def test_every_stage_in_every_layout(inside: dict, stage: int, how: dict) -> None:
    layout = Layout(zero=stage, **inside)
    choice = {"num_layers": 5, "dropout": 0.1, "batch": 24, "micro_batches": 3} | how
    hold(layout, **choice)
    if how == WAYS[1]:  # float32 is checked for one of them
        single = report(layout, "float32", **choice)
        assert single.wrong == []
        assert single.worst_gradient <= 1e-6


MORE_DEVICES = [
    "dp=16",
    "dp=4 tp=4 sequence_parallel=true",
    "dp=2 cp=2 row=2 col=2",
    "pp=4 ep=2 cp=2",
    "pp=2 dp=2 tp=4 schedule=zb-h1",
]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("layout", MORE_DEVICES)
def test_sixteen_devices(layout: str, stage: int) -> None:
    hold_in_a_process(f"{layout} zero={stage}", num_layers=5, batch=32, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=2)],
    ids=str,
)
def test_in_bfloat16_a_step_is_the_same_without_zero(layout: Layout) -> None:
    """Matmuls are the same and sums use float32, so differences stay far below bfloat16's 2**-8.

    ZeRO 3 has the last layer outside of the loop, in a separate program, in which XLA would skip
    other roundings to bfloat16 between operations; here it skips none.
    """
    every_rounding = {"xla_allow_excess_precision": False}
    found = []
    for stage in (0, layout.zero):
        program = made(dataclasses.replace(layout, zero=stage), dtype="bfloat16")
        state, batch = drawn(program), program.place(tiny.batch())
        step = program.step_with_gradients.lower(state, batch).compile(every_rounding)
        state, metrics, grads = step(state, batch)
        found.append((float(metrics["loss"]), jax.jit(program.canonical)(grads)))
    (loss, want), (again, grads) = found
    assert again == pytest.approx(loss, rel=1e-6)
    for name, g in grads.items():
        assert g.dtype == jnp.float32
        size = np.linalg.norm(want[name])
        assert np.linalg.norm(g - want[name]) <= 1e-5 * size, name


# ---- evaluation, generation, initial state -------------------------------------------------------

SPREAD = [Layout(ep=2, tp=2, zero=2), Layout(pp=2, dp=2, zero=3), Layout(cp=2, zero=3)]


@functools.cache
def made(layout: Layout, **choice: Any) -> Program:
    return tiny.FromZeros(tiny.config(layout, **choice), make_mesh(layout))


def drawn(program: Program) -> dict[str, Any]:
    """An initial state with the same random parameters on every layout, and zero moments."""
    draw = np.random.default_rng(0)
    params = {
        name: (0.3 * draw.normal(size=info.shape) + name.endswith("norm.w")).astype(np.float32)
        for name, info in program.infos.items()
    }
    stored = program.states.stored
    held = jax.jit(
        lambda params: {name: stored[name].from_canonical(p) for name, p in params.items()}
    )
    placed = jax.device_put(held(params), shardings(stored, program.mesh))
    return {**program.init_state(), "params": placed}


@pytest.mark.slow
def test_an_evaluation_equals_one_devices() -> None:
    targets = np.where(np.arange(8) < np.arange(8)[:, None], -1, tiny.batch()["targets"])
    batch = {**tiny.batch(), "targets": targets}
    found = []
    for layout in (Layout(), *SPREAD):
        program = made(layout)
        sums = program.eval_step(drawn(program)["params"], program.place(batch))["cross_entropy"]
        found.append((float(sums["sum"]), int(sums["targets"])))
    for loss, tokens in found:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert tokens == 36


@pytest.mark.slow
def test_generated_text_equals_one_devices() -> None:
    written = []
    for layout in (Layout(), *SPREAD[:2], Layout(dp=2, zero=3)):
        program = made(layout)
        write = Generator(program, tiny.VOCAB, Sampling(temperature=0))
        written.append(write(drawn(program)["params"], [1, 2, 3], 5))
    assert len(set(written[0])) > 1
    assert written == [written[0]] * len(written)


def test_initial_parameters_are_the_same_bits() -> None:
    one, spread = Layout(), Layout(pp=2, dp=2, zero=3)
    want = Program(tiny.config(one), make_mesh(one)).init_state()["params"]
    program = Program(tiny.config(spread), make_mesh(spread))
    found = jax.jit(program.canonical)(program.init_state()["params"])
    for name, x in found.items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)


# ---- bad values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [4, -1])
def test_an_unknown_stage_is_refused(stage: int) -> None:
    with pytest.raises(UserError, match=rf"layout.zero={stage}: use one of 0, 1, 2, 3"):
        Layout(zero=stage)
